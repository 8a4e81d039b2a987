"""Muon's update is torch's, whose products are in bfloat16, to their rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core.mesh import make_mesh
from megajax.core.optim.config import OptimizerConfig
from megajax.core.optim.muon import Matrices, orthogonal_updates

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")


@pytest.mark.parametrize(("ours", "theirs"), [("spectral", "original"), ("match-adamw", "match_rms_adamw")])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_one_update(ours: str, theirs: str, shape: tuple[int, int]) -> None:
    """Of a weight [inputs, outputs], from a gradient and no momentum; torch has outputs first."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    grad = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight = torch.nn.Parameter(torch.zeros(shape[::-1]))
    weight.grad = torch.from_numpy(grad.T.copy())
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn=theirs).step()
    config = OptimizerConfig(learning_rate=1.0, schedule="constant", name="muon", muon_scale=ours)

    path = ("blocks", "mlp", "up", "weight")
    matrices = {path: Matrices.of(shape, P("embed", "mlp"), P(None, None))}

    def region(grad):
        return orthogonal_updates({path: grad}, matrices, config, jnp.float32)[path]

    mesh = make_mesh(jax.devices()[:1])
    update = jax.jit(jax.shard_map(region, mesh=mesh, in_specs=P(), out_specs=P()))(grad)
    expected = -weight.detach().numpy().T
    assert np.linalg.norm(np.asarray(update) - expected) < 0.02 * np.linalg.norm(expected)  # five steps in bfloat16
