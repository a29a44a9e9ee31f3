"""The most memory that this process has had at once. A part of the benchmarks of memory."""

import re
import resource
import sys
from pathlib import Path


def peak() -> int:
    """Bytes. On Linux not from `ru_maxrss`, which a process inherits from the one that started it."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
