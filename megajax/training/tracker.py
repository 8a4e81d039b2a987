"""Where a run is recorded: the one interface of metrics.jsonl, TensorBoard, loss.png, Weights & Biases and MLflow."""

from collections.abc import Mapping


class Tracker:
    """A place that gets the configuration, the figures and the texts of a run as they come; by itself it keeps nothing.

    What cannot be recorded raises `OSError`; it is reported once, and then the tracker is asked no more, unless it
    `tries_again`. Figures have the names of metrics.jsonl and may be not finite.

    Attributes:
        name: of the place, for messages.
        tries_again: whether it is asked again after an error.
    """

    name: str
    tries_again = False

    def config(self, text: str, values: Mapping[str, object]) -> None:
        """What the run was started with: the text of its `config.toml`, and its values by key, as `to_values`
        gives them."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures after so many steps."""

    def text(self, step: int, name: str, text: str) -> None:
        """A text after so many steps, by the name of what it is: "sample", "validation"."""

    def news(self) -> list[str]:
        """Lines that tell what has happened there since the last time; none from most."""
        return []

    def close(self, *, finished: bool) -> None:
        """The end of this start of the run; whether the run has taken all its steps."""
