"""The sites of a real step: all are told, of every row, and a mesh changes none."""

from tiny import tiny_config

from megajax.verify.comparison import trace
from megajax.verify.recording import Recording, first_difference

LAYER = {
    *("input", "attention_norm", "query", "key", "value", "attention_heads", "attention_output", "attention_dropout"),
    *("attention_residual", "mlp_norm", "mlp_up", "mlp_activation", "mlp_output", "mlp_dropout", "output"),
}
HEAD = {"last_output", "final_norm", "logits", "losses"}


def recorded(mesh: tuple[int, int, int], **options) -> Recording:
    recording = Recording()
    with recording.taken():
        trace(tiny_config(mesh, num_layers=1, global_batch=2, dropout=0.1, **options), 1, quick_compile=True)
    return recording


def test_every_site_of_a_step_on_two_meshes() -> None:
    alone, split = recorded((1, 1, 1)), recorded((1, 1, 2), sequence_parallel=True, remat="layer")
    expected = {(0, site, back) for site in LAYER for back in (False, True)}
    expected |= {(-1, site, back) for site in HEAD for back in (False, True)}
    for recording in (alone, split):
        assert {*recording.places} == expected
        assert all(recording.samples(place) == [0, 1] for place in recording.places)
    assert first_difference(alone, split, 1e-4) is None
