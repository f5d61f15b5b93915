"""Memory of the process, as reported by the operating system."""

from __future__ import annotations

import os
import resource
import sys


def anonymous_bytes() -> int:
    """Return the resident memory of this process without memory-mapped files, in bytes.

    On systems other than Linux, returns the peak of the resident memory.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except FileNotFoundError:  # not Linux: only the peak is available
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
