"""The H200 that steps are compiled for has the libraries that are installed here."""

from types import SimpleNamespace

from megajax.plan import h200


def test_the_target_has_the_installed_libraries(monkeypatch) -> None:
    """In CUDA 12's packages and 13's; without any, those of JAX 0.11.2."""
    installed = [
        SimpleNamespace(name="nvidia-cudnn-cu13", version="9.28.1.4"),
        SimpleNamespace(name="nvidia-cuda-runtime", version="13.5.37"),
        SimpleNamespace(name="nvidia-cuda-nvcc", version="1.2.3"),
    ]
    monkeypatch.setattr(h200, "distributions", lambda: installed)
    assert "dnn_version_info { major: 9 minor: 28 patch: 1 }\nruntime_version { major: 13 minor: 5 patch: 37 }" in (
        h200._target()
    )
    installed[:] = [SimpleNamespace(name="nvidia-cudnn-cu12", version="9.10.2.21")]
    assert h200._versions() == ((9, 10, 2), (13, 0, 0))
