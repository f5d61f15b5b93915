"""The memory of one rank, followed from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardscope.training.memory.activations import Activations
from shardscope.training.memory.process import anonymous_bytes
from shardscope.training.memory.storages import KINDS, Held, Storages


class StepMemory:
    """Peak memory of one rank in one step, by kind, in bytes.

    Args:
        held: Returns the tensors that the strategy holds now, by kind.
        inputs: The step's inputs and targets, which do not count as activations.
    """

    def __init__(self, held: Callable[[], Held], inputs: Iterable[Tensor]) -> None:
        self._held = held
        self._storages = Storages()
        self._storages.add("inputs", inputs)
        self.peaks = dict.fromkeys(KINDS, 0)
        self.activations = Activations(self._storages, self._at_parameter)

    def sample(self) -> None:
        """Count the tensors that are held now."""
        held = self._held()
        assert set(held) <= set(KINDS), f"{sorted(set(held) - set(KINDS))} are not kinds of memory"
        self._storages.add_all(held)
        self._note()

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count `tensors` under `kind` from now until their memory is freed, or their storage resized to nothing."""
        self._storages.add(kind, tensors)
        self._note()

    def _at_parameter(self, tensor: Tensor) -> None:
        """Sample where a parameter is used, as it and the others of its unit have then been gathered."""
        kinds = self._storages.kinds(tensor)
        if None in kinds:
            self.sample()
        elif "gathered" in kinds:
            self._note()

    def _note(self) -> None:
        now = {**self._storages.sizes(), "activations": self.activations.peak}
        self.peaks = {kind: max(peak, now.get(kind, 0)) for kind, peak in self.peaks.items()}


class MemoryWatch:
    """Follows the memory of one rank, from the creation of this object.

    On a GPU the process's memory is the memory that torch's allocator has handed out. On the CPU it is the anonymous
    memory of the process beyond the amount before the model was built: the interpreter and libraries, mostly shared
    between ranks, are left out.

    Args:
        device: The device that computes.
        held_bytes: Bytes of the model and its optimizer, if they were built before this object.

    Attributes:
        peak: Maximum memory of the process so far, in bytes.
        step: The counter by kind on a measured step; None on all others.
    """

    def __init__(self, device: torch.device, *, held_bytes: int = 0) -> None:
        self.device = device
        self.peak = 0
        self.step: StepMemory | None = None
        self._base = 0 if device.type == "cuda" else anonymous_bytes() - held_bytes

    def sample(self) -> int:
        """Current memory of the process, in bytes; also updates the peaks."""
        if self.step is not None:
            self.step.sample()
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return torch.cuda.memory_allocated(self.device)
        now = max(0, anonymous_bytes() - self._base)
        self.peak = max(self.peak, now)
        return now

    def hold(self, kind: str, *tensors: Tensor) -> None:
        """Count tensors that live only between two samples, such as gathered parameters; a no-op on other steps."""
        if self.step is not None:
            self.step.hold(kind, tensors)

    @contextmanager
    def measure(self, held: Callable[[], Held], inputs: Iterable[Tensor]) -> Iterator[StepMemory]:
        """Context in which memory is counted by kind; the arguments are those of `StepMemory`."""
        self.step = StepMemory(held, inputs)
        try:
            self.step.sample()
            with self.step.activations.active():
                yield self.step
            self.step.sample()
        finally:
            self.step = None
