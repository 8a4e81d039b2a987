"""Compare what a step communicates with theory."""

from collections import Counter
from collections.abc import Iterable

from megajax.config import Config
from megajax.plan.communication import Communication, totals
from megajax.program.communication import Collective
from megajax.verify.theory import theory_of
from megajax.verify.verdict import Finding


def check_collectives(config: Config, found: Iterable[Collective]) -> Finding:
    """Compare the exact counts and bytes of all collectives of a step, by kind, axes and shape."""
    expected = theory_of(config)
    wanted, there = totals(expected), totals(found)
    wrong = [key for key in wanted.keys() | there.keys() if wanted[key] != there[key]]
    where = f"{sum(wanted.values())} collectives, {_bytes(wanted):,} bytes"
    if wrong:
        words = [_difference(key, wanted, there, expected) for key in sorted(wrong, key=str)]
        where = "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")
    return Finding(f"{config.precision} communication, against theory", len(wrong), 0, where)


def _bytes(counts: Counter) -> int:
    return sum(count * key[-1] for key, count in counts.items())


def _difference(key: tuple, wanted: Counter, there: Counter, expected: list[Communication]) -> str:
    kind, axes, shape, num_bytes = key
    purposes = {each.purpose for each in expected if (each.kind, each.axes) == (kind, axes) and shape in each.shapes}
    of = f" ({', '.join(sorted(purposes))})" if purposes else ""
    return (
        f"{there[key]} instead of {wanted[key]} {kind} over {' x '.join(axes)} of {list(shape)}, "
        f"{num_bytes} bytes each{of}"
    )
