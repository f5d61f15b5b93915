"""Marks of the time at which a device reaches a point of the program: clock times on the CPU, CUDA events on a GPU.

A GPU runs behind the Python program, and waiting for the GPU would slow down the training loop. So a mark on a GPU is a
CUDA event in its queue, whose time is read once the GPU has passed the event.
"""

from __future__ import annotations

import torch

from shardscope.training import clock

Mark = float | torch.cuda.Event


class Marks:
    """Creates and reads the marks of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.synchronize(device)
            self._zero = self._event()
            torch.cuda.synchronize(device)
            self._zero_s = clock.now()

    def now(self) -> Mark:
        """Return a mark for the time at which the device has completed all work submitted so far."""
        return self._event() if self._is_cuda else clock.now()

    def is_past(self, mark: Mark) -> bool:
        """Return whether the device has reached this mark."""
        return isinstance(mark, float) or bool(mark.query())

    def seconds(self, mark: Mark) -> float:
        """Return the time of a mark that the device has reached, in Unix seconds."""
        if isinstance(mark, float):
            return mark
        return self._zero_s + float(self._zero.elapsed_time(mark)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Value:
    """A number that the device computes: read immediately on the CPU, copied in the background on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._copy: torch.Tensor | float = float(tensor) if tensor.device.type == "cpu" else _copied(tensor)

    def read(self) -> float:
        """Return the number. Call it only after the device has passed a later `Marks.now`."""
        return float(self._copy)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
