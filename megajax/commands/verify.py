"""`megajax verify`: hold a configuration on its mesh against one device, in small, on simulated devices."""

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megajax.config import Config
from megajax.errors import UserError
from megajax.flags import Parser, add_flag
from megajax.options import Option, between
from megajax.presets import load_preset, preset_names, resolve
from megajax.validation import validate
from megajax.verify.fold import nearest

_MOST_DEVICES = 16


def main(argv: Sequence[str]) -> int:
    """Verify a configuration on a mesh; the exit code is 0 where nothing differs, else 1.

    Raises:
        UserError: a flag, the preset or the mesh is not valid, or it cannot be shrunk.
    """
    began = time.monotonic()
    config, args = _parse(argv)
    check_mesh(config)
    from megajax.verify.shrink import shrink

    small = shrink(config, args.devices)
    _start(small.config)
    from megajax.verify.report import Report
    from megajax.verify.verify import verify

    report = Report(config, small)
    result = verify(small.config, steps=args.steps, quick_compile=not args.optimize, report=report)
    report.close(result, time.monotonic() - began)
    if args.json:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(report.figures(result) | {"seconds": time.monotonic() - began, "peak_bytes": peak}))
    return 0 if result.passed else 1
