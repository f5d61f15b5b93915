"""Memory of the process, as reported by the operating system."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from functools import lru_cache


def anonymous_bytes() -> int:
    """Return the resident memory of this process without memory-mapped files, in bytes.

    On systems other than Linux, returns the peak of the resident memory.
    """
    try:
        file = _statm(os.getpid())
    except FileNotFoundError:  # not Linux: only the peak is available
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    fields = os.pread(file, 256, 0).split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


@lru_cache(maxsize=1)
def _statm(_pid: int) -> int:
    """Return an open file with the sizes of this process's memory; a process that has been forked opens its own."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
