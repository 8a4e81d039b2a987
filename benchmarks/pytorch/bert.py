"""BERT of `transformers`, the same function of the same weights as `megajax.core.models.bert`, on one device:
`MegatronBertForPreTraining` for the layer order "pre", `BertForPreTraining` for "post".

Letters: B batch, T tokens, M masked tokens, V vocabulary, C classes.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from megajax.core.models.config import ModelConfig

IGNORED = -1  # target of what is not predicted
_CLASSES = {
    "pre": (transformers.MegatronBertConfig, transformers.MegatronBertForPreTraining),
    "post": (transformers.BertConfig, transformers.BertForPreTraining),
}


class Bert(nn.Module):
    """The model up to its losses."""

    inputs = ("tokens", "token_types", "places", "targets", "length", "order")
    residual = ("output.dense.weight",)  # end the names of the weights before the residual additions

    def __init__(self, config: ModelConfig):
        super().__init__()
        settings, kind = _CLASSES[config.layer_order]
        self.model: Any = kind(
            settings(
                vocab_size=config.padded_vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_size,
                max_position_embeddings=config.sequence_length,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=None,  # else the padding's row gets no gradient
            )
        )
        self.config, self.padded = config, config.padded_vocab_size - config.vocab_size

    def forward(
        self,
        tokens_BT: Tensor,
        types_BT: Tensor,
        places_BM: Tensor,
        targets_BM: Tensor,
        length_B: Tensor,
        order_B: Tensor,
    ) -> Tensor:
        """Sums of the cross-entropy over the masked tokens, and over the samples of two segments, in fp32; [2].
        transformers computes the logits of all tokens."""
        there_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < length_B[:, None]
        found = self.model(input_ids=tokens_BT, token_type_ids=types_BT, attention_mask=there_BT.long())
        logits_BTV = found.prediction_logits
        if self.padded:
            logits_BTV = logits_BTV[..., : self.config.vocab_size]
        row_B1 = torch.arange(len(logits_BTV), device=logits_BTV.device)[:, None]
        masked = _loss_sum(logits_BTV[row_B1, places_BM].flatten(0, 1), targets_BM.flatten())
        return torch.stack([masked, _loss_sum(found.seq_relationship_logits, order_B)])

    @staticmethod
    def num_targets(arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Of every loss in a batch."""
        return np.array([np.count_nonzero(arrays[name] != IGNORED) for name in ("targets", "order")])

    def canonical_weights(self, params: dict) -> dict[str, Tensor]:
        """The parameters by name, from the nested dict of our canonical weights; for tests, as it needs JAX."""
        from megajax.convert.bert import EXCHANGES
        from megajax.convert.weights import to_tensors

        (exchange,) = (each for each in EXCHANGES if each.options["layer_order"] == self.config.layer_order)
        tensors = to_tensors(exchange.places(self.config), params, self.config)
        padding = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"} if self.padded else set()
        weights = {f"model.{name}": torch.tensor(tensor) for name, tensor in tensors.items() if name not in padding}
        for name in padding:
            tensor = torch.tensor(tensors[name])
            weights[f"model.{name}"] = torch.cat([tensor, tensor.new_zeros(self.padded, *tensor.shape[1:])])
        return weights


def _loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
