"""The interface of metrics.jsonl, TensorBoard, loss.png, Weights & Biases and MLflow."""

from collections.abc import Mapping


class Tracker:
    """Receives the configuration, the figures and the texts of a run; this base class ignores them.

    A method that cannot record raises `OSError`. That is reported once, and then the tracker is dropped unless it
    `tries_again`. Figures have the names of metrics.jsonl and may be infinite or NaN.
    """

    name: str
    tries_again = False

    def config(self, text: str, values: Mapping[str, object]) -> None:
        """The configuration of this start: the text of its `config.toml`, and its values by key (`to_values`)."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures after `step` steps."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text after `step` steps; its name is "sample" or "validation", for example."""

    def news(self) -> list[str]:
        """Lines for the user since the last call."""
        return []

    def close(self, *, finished: bool) -> None:
        """The end of this start; `finished` if the run has taken all its steps."""
