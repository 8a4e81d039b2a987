"""Our GPT-2 is the GPT-2 of `transformers`: same weights, same logits, loss and gradients."""

import jax
import numpy as np
import pytest
from canonical_weights import from_tensors, places_of
from drawn import placed
from hugging_face import peer_model
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.models.config import ModelConfig
from megajax.program.scoring import next_logits
from megajax.program.train_step import loss_and_gradients
from megajax.verify import named_leaves

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
pytest.importorskip("transformers", reason="the extra `peer` is not installed")


def our_weights(tensors: dict, model: ModelConfig) -> dict:
    """Weights (or gradients) of the peer under our names and shapes, layers stacked."""
    return from_tensors(places_of(model), lambda name: tensors[name].numpy(), model)


@pytest.mark.parametrize("mesh", [pytest.param((1, 1, 1), marks=pytest.mark.full), (1, 2, 2)])
def test_logits_loss_and_gradients_equal_transformers(mesh):
    config = tiny_config(mesh, global_batch=4, microbatch=2, dropout=0.0, num_layers=3, hidden_size=32, num_heads=4)
    program, model = tiny_program(config), config.model
    peer = peer_model(model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (4, model.sequence_length + 1), np.int32)
    targets = np.where(rng.random((4, model.sequence_length)) < 0.2, np.int32(IGNORED), tokens[:, 1:])

    logits = peer(torch.tensor(tokens[:, :-1], dtype=torch.long)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(targets.ravel(), dtype=torch.long), ignore_index=IGNORED
    )
    loss.backward()
    weights = {name: tensor.detach() for name, tensor in peer.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}

    params = placed(program, our_weights(weights, model))
    batch = program.put_batch({"tokens": tokens[:, :-1], "targets": targets}, program.local_rows)
    ours, grads = loss_and_gradients(program)(params, batch, np.int32(0))
    assert float(ours) == pytest.approx(loss.item(), rel=1e-6)
    expected = named_leaves(our_weights(gradients, model))
    actual = named_leaves(program.layout.canonical_weights(jax.device_get(grads)))
    assert expected.keys() == actual.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(actual[name], leaf, rtol=0, atol=1e-5 * max(np.abs(leaf).max(), 1e-2), err_msg=name)

    position = model.sequence_length - 3
    ours_last = np.asarray(next_logits(program)(params, batch, np.int32(position)))[:, : model.vocab_size]
    peer_last = logits[:, position].detach().numpy()
    np.testing.assert_allclose(ours_last, peer_last, rtol=0, atol=1e-5 * np.abs(peer_last).max())
