"""Where config.json says how many tokens a token sees, and in which layers: windows of attention."""

from dataclasses import dataclass
from typing import Any

from megajax.convert.parts import Lacks, OptionGroup
from megajax.convert.settings import Fields
from megajax.core.models.config import ModelConfig
from megajax.core.models.turns import in_turns

_KINDS = "full_attention", "sliding_attention"  # names in `layer_types` for layers without a window and with one


@dataclass(frozen=True)
class Window:
    """Where a class's config.json has the window: in `sliding_window`, for all layers, or those that fields select."""

    size: int | None = 4096  # if the field is missing
    never: bool = False  # whether there is none
    switched: bool = False  # whether it is there only if `use_sliding_window` is set
    first: int | None = None  # if `max_window_layers` is missing: the first layer with a window
    pattern: int | None = None  # every so many layers one has no window
    local: bool = False  # whether `sliding_window_pattern` replaces it
    own_base: bool = False  # whether layers with a window may have another rotary base

    @property
    def mixes(self) -> bool:
        """Whether `layer_types` may give some layers the window and others none."""
        return self.first is not None or self.pattern is not None

    def options(self) -> OptionGroup:
        """How config.json represents the window."""
        covered = "sliding_window", "window_layers", "window_rope_theta"
        return OptionGroup(covered, self._read, self._write, self._lacks)

    def _read(self, fields: Fields) -> dict[str, Any]:
        size, layers = fields.get("sliding_window", None if self.never else self.size), fields["num_hidden_layers"]
        if self.never:
            fields.check("sliding_window", None)
        if self.switched:
            fields.check("use_sliding_window", False, True)
            size = size if fields.get("use_sliding_window") else None
        if size is not None:
            fields.whole("sliding_window", size, "null, or a whole number above 0", least=1, most=999_999_999)
        windowed = self._windowed(fields, layers, size is not None)
        if not any(windowed):
            return {"sliding_window": 0, "window_rope_theta": 0.0}
        return {"sliding_window": size, "window_layers": in_turns(windowed)}

    def _windowed(self, fields: Fields, layers: int, has_window: bool) -> list[bool]:
        """Which layers have the window; without one, none has."""
        types = None if self.switched and not self.mixes else fields.get("layer_types")
        if types is None:
            return self._by_number(fields, layers) if has_window else [False] * layers
        if has_window and self.mixes:
            fits = type(types) is list and len(types) == layers and {*types} <= {*_KINDS}
            valid = f"{_KINDS[1]} or {_KINDS[0]} for each of {layers} layers"
        else:
            fits = types == [_KINDS[has_window]] * layers
            valid = f"{_KINDS[has_window]} {layers} times: the same in all layers"
        if not fits:
            raise fields.refusal("layer_types", types, valid)
        return [each == _KINDS[1] for each in types]

    def _by_number(self, fields: Fields, layers: int) -> list[bool]:
        """The same without `layer_types`."""
        first, pattern = 0, self.pattern or layers + 1
        if self.first is not None:
            valid = "0 or more: layers before this one have no window"
            first = fields.whole("max_window_layers", self.first, valid)
        if self.local:
            valid = "1 or more: every so many layers one has no window"
            pattern = fields.whole("sliding_window_pattern", pattern, valid, least=1)
        return [layer >= first and (layer + 1) % pattern > 0 for layer in range(layers)]

    def _write(self, model: ModelConfig) -> dict[str, Any]:
        windowed = model.windowed_in_order
        # Where layers follow a pattern, transformers makes a mask with the window even if no layer uses it.
        size = model.sliding_window or (None if self.pattern is None else self.size)
        settings: dict[str, Any] = {} if self.never else {"sliding_window": size}
        settings |= {"use_sliding_window": bool(model.sliding_window)} if self.switched else {}
        settings |= {"layer_types": [_KINDS[each] for each in windowed]} if self.mixes else {}
        return settings | ({} if self.first is None else {"max_window_layers": (*windowed, True).index(True)})

    def _lacks(self, model: ModelConfig) -> Lacks:
        if not model.sliding_window:
            return {}
        if self.never:
            return {"sliding_window": 0}
        found: Lacks = {"window_rope_theta": 0.0} if model.window_rope_theta and not self.own_base else {}
        return found if self.mixes or all(model.windowed) else found | {"window_layers": "all"}
