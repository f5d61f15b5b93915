"""The memory that a rank's own training takes, measured.

On a GPU this is what torch's allocator has handed out. On the CPU it is the anonymous memory of the process beyond
what it held before the model was built: the interpreter and libraries, mostly shared between ranks, are left out.
"""

from __future__ import annotations

import os
import resource
import sys

import torch


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process in bytes: everything but mapped files."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except FileNotFoundError:  # not Linux: the peak is all there is
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Follows the memory of one rank from where it starts. All figures in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self._base = 0 if device.type == "cuda" else anonymous_bytes()

    def sample(self) -> int:
        """What is held now; also moves the peak."""
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return torch.cuda.memory_allocated(self.device)
        now = max(0, anonymous_bytes() - self._base)
        self.peak = max(self.peak, now)
        return now
