"""What a whole training takes, from its tokens and a price: days, hours of all GPUs, cost."""

import re
from dataclasses import dataclass

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d{1,2}))?\s*([KMBT]?)", re.IGNORECASE)
_MOST = 1e18


def tokens_of(text: str) -> float | None:
    """The number in a text such as `15T`, `300B`, `2.5e9` or `1000000`; None if it is none from 1 to 10^18."""
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        return None
    number = float(match[1]) * 10 ** int(match[2] or 0) * _UNITS[match[3].upper()]
    return number if 1 <= number <= _MOST else None


@dataclass(frozen=True)
class WholeRun:
    """A training of this many tokens, at this price of an hour of a GPU; 0: unknown."""

    tokens: float = 0.0
    price: float = 0.0

    def figures(self, tokens_per_second: float, devices: int) -> dict[str, float]:
        """Days, hours of all GPUs and their cost, as far as they follow."""
        if not self.tokens:
            return {}
        seconds = self.tokens / tokens_per_second
        hours = seconds / 3600 * devices
        return {"days": seconds / 86400, "gpu_hours": hours} | ({"cost": hours * self.price} if self.price else {})
