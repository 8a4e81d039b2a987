"""The memory of this process."""

import contextlib
import re
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    with contextlib.suppress(OSError):  # what `getrusage` says has that of the process that started this one
        if found := re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
