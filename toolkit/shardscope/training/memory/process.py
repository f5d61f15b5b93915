"""The memory of a whole process, as the operating system reports it."""

from __future__ import annotations

import os
import resource
import sys


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process in bytes: everything but mapped files."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except FileNotFoundError:  # not Linux: only the peak is available
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
