"""The output of `megajax verify`: what runs, a line per check, and where something differs."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from megajax.core.models.config import ModelConfig
from megajax.core.options import counted, options
from megajax.core.traits import Changes, ShrinkRule, Size
from megajax.settings.config import Config
from megajax.settings.option_errors import compared
from megajax.verify.locate import Result
from megajax.verify.shrink import Shrunk, shown, shown_sizes
from megajax.verify.verdict import Finding

_MODEL = options(ModelConfig)
_SIZES = [
    name
    for name, key in compared(ModelConfig, *Changes).items()
    if _MODEL[key].trait(Size) or _MODEL[key].trait(ShrinkRule)
]
_BATCH = ("global_batch", "microbatch")
_NAME = 48  # columns


class Report:
    """Prints lines while the preset `name` is verified with a scaled-down configuration, `exact`ly alone or as floats,
    too, and collects the figures."""

    def __init__(
        self, name: str, config: Config, small: Shrunk, *, exact: bool = False, printed: bool = True, began: float = 0
    ):
        self._name, self._config, self._small = name, config, small
        self._devices = "devices, over finite fields" if exact else "simulated devices"
        self._console = Console(highlight=False, soft_wrap=True, quiet=not printed)
        self._began = began or time.monotonic()
        self._status: Status | None = None
        for line in self._head():
            self._print(line)

    def start(self, what: str) -> None:
        """Called when a run starts."""
        if not self._console.is_terminal:
            return
        self.stop()
        self._status = self._console.status(Text(f"{what}, after {time.monotonic() - self._began:.0f} s"))
        self._status.start()

    def found(self, finding: Finding) -> None:
        """Called when a check is done."""
        state = "" if finding.passed else "  DIFFERS"
        self._print(
            f"{finding.name:<{_NAME}} {_figure(finding):<9} {_limit(finding):<14} {finding.where}{state}".rstrip()
        )

    def stop(self) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def close(self, result: Result) -> None:
        """Print the summary."""
        self.stop()
        seconds = f"{time.monotonic() - self._began:.0f} s"
        checks = len(result.verdict.findings)
        if result.passed:
            self._print(f"\nall {checks} checks agree, {seconds}" if checks > 1 else f"\n1 check agrees, {seconds}")
            return
        failed = result.verdict.failed
        self._print(f"\n{len(failed)} of {counted(checks, 'check')} differ{'s' * (len(failed) == 1)}, {seconds}")
        for line in explanation(result):
            self._print(line)

    def figures(self, result: Result) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "preset": self._name,
            "passed": result.passed,
            "mesh": shown_sizes(self._config.mesh),
            "verified_mesh": shown_sizes(self._small.config.mesh),
            "sizes": self._sizes(),
            "notes": list(self._small.notes),
            "checks": [asdict(finding) | {"passed": finding.passed} for finding in result.verdict.findings],
            "axes": [list(axes) for axes in result.axes.sets] if result.axes else None,
            "first_difference": result.first or None,
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def _sizes(self) -> dict[str, list[Any]]:
        """Every size in the user's configuration and in the small one."""
        both = self._config, self._small.config
        sizes = {name: [getattr(config.model, name) for config in both] for name in _SIZES}
        return sizes | {name: [getattr(config.train, name) for config in both] for name in _BATCH}

    def _head(self) -> Iterator[str]:
        ours = self._small.config.mesh
        mesh, folded = shown(self._config.mesh), shown(ours)
        yield f"{self._name} on {mesh} ({' x '.join(ours.shown)}), on {ours.num_devices} {self._devices}"
        if mesh != folded:
            yield f"folded to {folded}, which keeps every axis within --devices"
        yield "scaled down: " + ", ".join(f"{name} {a} -> {b}" for name, (a, b) in self._sizes().items() if a != b)
        for note in self._small.notes:
            yield f"note: {note}"
        yield ""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)


def explanation(result: Result) -> Iterator[str]:
    """Where a mesh differs: the first place, the axes, the first failed check, and the gradients."""
    yield f"  first      {result.first or 'no recorded activation differs'}"
    if result.axes is not None:
        yield f"  axes       {result.axes}"
    failed = result.verdict.failed
    named = [failed[0], *(finding for finding in failed[1:] if finding.name.endswith(" gradients"))]
    for finding in named[:2]:
        kind = "gradients" if finding.name.endswith(" gradients") else "check"
        yield f"  {kind:<10} {finding.name} {_figure(finding)}, {_limit(finding)}: {finding.where}"


def _figure(finding: Finding) -> str:
    return f"{finding.figure:.1e}" if finding.limit else f"{finding.figure:g} wrong"


def _limit(finding: Finding) -> str:
    return f"limit {finding.limit:.2g}" if finding.limit else "limit equal" if finding.exact else "limit 0"
