"""What JAX's private names are for."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention

from megajax.plan import h200


def test_a_gpu_is_imagined_for_a_while():
    """Afterwards JAX asks this machine's GPU again, whatever happened in between."""
    names = "check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"
    before = [getattr(attention, name) for name in names]
    with pytest.raises(ZeroDivisionError), h200.attention():
        assert attention.check_cudnn_version() == 91900
        assert attention.check_compute_capability("9.0") and not attention.check_compute_capability("10.0")
        assert attention.is_cuda_compute_capability_equal("9.0")
        raise ZeroDivisionError
    assert [getattr(attention, name) for name in names] == before
