"""Measurement of one rank's memory during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training import clock
from shardscope.training._compat import fsdp_modules, is_in_backward
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.process import anonymous_bytes
from shardscope.training.memory.storages import KINDS, Held, Storages

_ACTIVATIONS = KINDS.index("activations")
_NOTICEABLE = 40
"""Inverse of the minimum change of activation memory, relative to its peak so far, that adds a point to the curve."""
_MOST_POINTS = 400
"""Largest number of points of a step's memory curve; beyond it, every second point is dropped."""


class StepMemory:
    """Measures the peak memory of one rank during one step, for each type of memory.

    Args:
        held: Function that returns the tensors that the strategy currently keeps, by type of memory.
        inputs: The step's inputs and targets, which are not counted as activations.

    Attributes:
        peaks: Maximum so far for each type of memory, in bytes.
        peak: Maximum so far of all types together, in bytes.
        curve: Changes of memory over time: Unix time, and the bytes of each type of memory in the order of `KINDS`.
        activations: Counter of the activations.
    """

    def __init__(self, held: Callable[[], Held], inputs: Iterable[Tensor]) -> None:
        self._held = held
        self._storages = Storages()
        self._storages.add("inputs", inputs)
        self.peaks = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self._without_activations = 0
        self._is_running = False
        self.curve: list[list[float]] = []
        self.activations = Activations(self._storages, self._at_parameter, self._activations_changed)

    def sample(self) -> None:
        """Update the peaks with the tensors that are in memory now."""
        held = self._held()
        assert set(held) <= set(KINDS), f"{sorted(set(held) - set(KINDS))} are not in KINDS"
        self._storages.add_all(held)
        self.note()

    def at_unit(self) -> None:
        """Update the peaks when a sharding unit runs forward, by itself or in a part that the backward pass recomputes.

        The latter lists no tensors, as no other moment of a backward pass does before its gradients are reduced.
        """
        if is_in_backward():
            self.note()
        else:
            self.sample()

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count `tensors` as memory of type `kind` until they are freed, or their storage is resized to zero."""
        self._storages.add(kind, tensors)
        self.note()

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `memory` event: the peak of each type, the peak of all together, and the curve."""
        return {**self.peaks, "peak": self.peak, "curve": self.curve}

    def _at_parameter(self, tensor: Tensor) -> None:
        """Update the peaks when a parameter is used: at that time, all parameters of its sharding unit are gathered."""
        kinds = self._storages.kinds(tensor)
        if None in kinds:
            self.sample()
        elif "gathered" in kinds:
            self.note()

    def note(self) -> None:
        """Update the peaks with the tensors listed so far; before some of them are freed."""
        now = {**self._storages.sizes(), "activations": self.activations.peak}
        self.peaks = {kind: max(peak, now.get(kind, 0)) for kind, peak in self.peaks.items()}
        held = [self.activations.bytes if kind == "activations" else now.get(kind, 0) for kind in KINDS]
        self._without_activations = sum(held) - self.activations.bytes
        self.peak = max(self.peak, sum(held))
        self._trace(held)

    def _activations_changed(self, now: int) -> None:
        """Update the peak; add a point to the curve if activations have changed by a noticeable part of their peak."""
        if not self._is_running:  # since the last sample, the step has freed the gradients of the step before
            self._is_running = True
            self.note()
        self.peak = max(self.peak, self._without_activations + now)
        before = self.curve[-1][1:] if self.curve else [0] * len(KINDS)
        if abs(now - before[_ACTIVATIONS]) * _NOTICEABLE >= max(self.activations.peak, 1):
            self._trace([*before[:_ACTIVATIONS], now, *before[_ACTIVATIONS + 1 :]])

    def _trace(self, held: Sequence[float]) -> None:
        if not self.curve or list(held) != self.curve[-1][1:]:
            self.curve.append([round(clock.now(), 6), *held])
            if len(self.curve) > _MOST_POINTS:
                del self.curve[1::2]


class MemoryWatch:
    """Measures the memory of one rank's process, starting when this object is created.

    On a GPU, this is the memory allocated by PyTorch. On the CPU, it is the anonymous memory of the process, less the
    amount before the model was built: the interpreter and the libraries, which the ranks mostly share, do not count.

    Args:
        device: The device on which the rank computes.
        held_bytes: Size in bytes of the model and its optimizer, if they were built before this object; else 0.

    Attributes:
        peak: Maximum memory of the process so far, in bytes.
        step: The `StepMemory` of the current step if it is measured; otherwise None.
    """

    def __init__(self, device: torch.device, *, held_bytes: int = 0) -> None:
        self.device = device
        self.peak = 0
        self.step: StepMemory | None = None
        self._base = 0 if device.type == "cuda" else anonymous_bytes() - held_bytes

    def sample(self) -> int:
        """Update the peaks, and return the current memory of the process in bytes."""
        if self.step is not None:
            self.step.sample()
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return torch.cuda.memory_allocated(self.device)
        now = max(0, anonymous_bytes() - self._base)
        self.peak = max(self.peak, now)
        return now

    def hold(self, kind: str, *tensors: Tensor) -> None:
        """Count tensors as memory of type `kind`; for those that may be freed before the next `sample`.

        A no-op if the step is not measured.
        """
        if self.step is not None:
            self.step.hold(kind, tensors)

    def note(self) -> None:
        """Update the peaks with the tensors that earlier samples have listed; for those that are about to be freed."""
        if self.step is not None:
            self.step.note()

    @contextmanager
    def measure(
        self, held: Callable[[], Held], inputs: Iterable[Tensor], model: nn.Module
    ) -> Iterator[StepMemory]:
        """Return a context manager within which memory is counted by type.

        Args:
            held: As for `StepMemory`.
            inputs: As for `StepMemory`.
            model: The model. Where FSDP2 shards it, memory is also counted when a module has gathered its parameters
                for the forward pass, because autograd does not save the weights of a layer whose input does not require
                grad. It is counted again when the module has freed them after this pass.
        """
        step = self.step = StepMemory(held, inputs)
        units = fsdp_modules(model)
        hooks = [unit.register_forward_pre_hook(lambda *_: step.at_unit()) for unit in units]
        hooks += [unit.register_forward_hook(lambda *_: step.at_unit()) for unit in units]
        try:
            self.step.sample()
            with self.step.activations.active():
                yield self.step
            self.step.sample()
        finally:
            self.step = None
            for hook in hooks:
                hook.remove()
