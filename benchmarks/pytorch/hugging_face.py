"""BERT, Llama, Qwen2, Qwen3 and Mistral of `transformers`, the same function of the same weights as ours, on one
device: the class and the settings that `megajax convert export-hf` would write.

Letters: B batch, T tokens, M masked tokens, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megajax.convert.families import exchange_for
from megajax.convert.weights import to_tensors
from megajax.core.models.config import ModelConfig

IGNORED = -1  # target of what is not predicted


class HuggingFace(nn.Module):
    """A model up to its losses."""

    # End the names of the weights before the residual additions.
    residual = ("attention.output.dense.weight", "output.dense.weight", "o_proj.weight", "down_proj.weight")

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.exchange = config, exchange_for(config, "", "PRESET")
        settings = self.exchange.settings(config, (), None)["config.json"] | {"use_cache": False}
        settings |= {"vocab_size": config.padded_vocab_size, "pad_token_id": None}  # else its row gets no gradient
        kind = getattr(transformers, self.exchange.architecture(config))
        self.model: Any = kind(transformers.AutoConfig.for_model(**settings))
        self.pairs = config.family == "bert"
        text, pair = ("tokens", "targets"), ("tokens", "token_types", "places", "targets", "length", "order")
        self.inputs = pair if self.pairs else text

    def forward(self, tokens_BT: Tensor, *others: Tensor) -> Tensor:
        """Sum of the cross-entropy over the targets that are not `IGNORED`, in fp32; of pairs also that over the
        samples of two segments, [2]."""
        if not self.pairs:
            logits_BTV = self.model(input_ids=tokens_BT).logits[..., : self.config.vocab_size]
            return _loss_sum(logits_BTV.flatten(0, 1), others[0].flatten())
        types_BT, places_BM, targets_BM, length_B, order_B = others
        there_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < length_B[:, None]
        found = self.model(input_ids=tokens_BT, token_type_ids=types_BT, attention_mask=there_BT.long())
        logits_BTV = found.prediction_logits[..., : self.config.vocab_size]  # transformers computes those of all tokens
        row_B1 = torch.arange(len(logits_BTV), device=logits_BTV.device)[:, None]
        masked = _loss_sum(logits_BTV[row_B1, places_BM].flatten(0, 1), targets_BM.flatten())
        return torch.stack([masked, _loss_sum(found.seq_relationship_logits, order_B)])

    @staticmethod
    def num_targets(arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Of every loss in a batch."""
        counts = [np.count_nonzero(arrays[name] != IGNORED) for name in ("targets", "order") if name in arrays]
        return np.array(counts if len(counts) > 1 else counts[0])

    def canonical_weights(self, params: dict) -> dict[str, Tensor]:
        """The parameters by name, from the nested dict of our canonical weights; padded rows are zero."""
        found, shapes = {}, {name: weight.shape for name, weight in self.named_parameters()}
        for name, tensor in to_tensors(self.exchange.places(self.config), params, self.config).items():
            whole = found[f"model.{name}"] = torch.zeros(shapes[f"model.{name}"])
            whole[: len(tensor)] = torch.tensor(tensor)
        return found


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
