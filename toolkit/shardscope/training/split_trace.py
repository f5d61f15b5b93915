"""What a layer keeps in a backward pass that is split into the gradients of inputs and those of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardscope.spec.model.step import Moment, SplitBackward
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import AllocationLedger, Scratch, leaf_tensors
from shardscope.training.memory.replay import StepMark, highest, replay
from shardscope.training.memory.storages import Storages, storages
from shardscope.training.tensor.axis import recording

_FIRST, _SECOND = 0, 1


class Halves(NamedTuple):
    """Memory of a layer in the two halves of a backward pass."""

    grown: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """See `PipelinePiece.recompute_split`."""
    split: SplitBackward = SplitBackward()


def halves_of(
    layer: nn.Module,
    forward: Callable[[], Any],
    inputs: Sequence[Tensor],
    samples: int,
    scratch: Callable[[Any, Any, Any], Sequence[Scratch]],
) -> Halves:
    """Run the two halves of a layer's backward pass, and return their memory.

    The graph of the layer stays, as that of all layers but the last in a stage. All are 0 for a layer that no schedule
    with split backward passes can train.

    Args:
        layer: The layer.
        forward: Function that runs its forward pass.
        inputs: Tensors that the layer takes.
        samples: Number of samples in them.
        scratch: Function that returns the workspace of an operation; see `AllocationLedger`.
    """
    passes = _Passes(layer, inputs, scratch)
    with recording(), passes.ledger, passes.saved.active():
        outputs = [tensor for tensor in leaf_tensors(forward()) if tensor.requires_grad]
        if not outputs:
            return Halves()
        try:
            return passes.run([tensor.clone() for tensor in outputs], samples)  # views cannot be detached
        except (RuntimeError, KeyError):
            return Halves()
        finally:
            for parameter in layer.parameters():
                parameter.grad = None


class _Passes:
    """The passes of one layer, with a mark in the ledger after each operation."""

    def __init__(
        self,
        layer: nn.Module,
        inputs: Sequence[Tensor],
        scratch: Callable[[Any, Any, Any], Sequence[Scratch]],
    ) -> None:
        self.layer, self.inputs = layer, inputs
        held = Storages()
        held.add("held", [*layer.parameters(), *layer.buffers(), *inputs])
        self.saved = Activations(held)
        self.ledger = AllocationLedger(held, self._note, scratch)
        self.mark: StepMark | None = None
        self.placed: set[int] = set()

    def run(self, ends: list[Tensor], samples: int) -> Halves:
        """Run both halves, from tensors that nothing else holds."""
        from shardscope.training._compat_pipelining import stage_backward_input, stage_backward_weight

        saved = self.saved
        gradients: list[Tensor] = [torch.empty_like(tensor) for tensor in ends]
        before = saved.peak = saved.bytes
        self._begin(_FIRST)
        found, groups = stage_backward_input(ends, gradients, [*self.inputs], self.layer.parameters())
        first, between = saved.peak, saved.bytes
        del found
        delayed = [tensor for group in groups for tensor in leaf_tensors(group.get("grads"))]
        of_output = _common_bytes(gradients, delayed)
        del delayed
        for tensor in self.inputs:
            tensor.grad = None
        self._end(_FIRST)
        saved.peak = between
        self._begin(_SECOND)
        stage_backward_weight(self.layer.parameters(), groups)
        self._end(_SECOND)
        moments = highest(replay(self.ledger, 0, samples))
        grown = (first - before, between - before, saved.peak - before, saved.bytes - before)
        most, kept, again, after = (size / samples for size in grown)
        return Halves((most, kept, again, after), _split(moments, of_output / samples))

    def _begin(self, half: int) -> None:
        self.ledger.events.append(StepMark("turn", half, 0))
        self.mark = StepMark("backward", half, 0)

    def _end(self, half: int) -> None:
        self.mark = None
        self._place()
        self.ledger.events.append(StepMark("leave", half, 0))

    def _place(self) -> None:
        for place, parameter in enumerate(self.layer.parameters()):
            if parameter.grad is not None and place not in self.placed:
                self.placed.add(place)
                self.ledger.place(parameter, 0)

    def _note(self) -> None:
        if self.mark is not None:
            self._place()
            self.ledger.events.append(self.mark)


def _split(moments: Iterable[Moment], of_output: float) -> SplitBackward:
    """Return the memory of the two halves from their moments, whose `unit` is the number of the half."""
    rows = [*moments]
    starts, ends = (
        {row.unit: row.activations for row in rows if row.phase == phase} for phase in ("turn", "leave")
    )
    second = [
        (row.activations - starts[_SECOND], row.arriving, row.around)
        for row in rows
        if row.unit == _SECOND and row.phase == "backward"
    ]
    return SplitBackward(
        first=max(row.activations for row in rows if row.unit == _FIRST) - starts[_FIRST],
        kept=ends[_FIRST] - starts[_FIRST],
        of_output=of_output,
        second=tuple(
            row for row in second if not any(other != row and _covers(other, row) for other in second)
        ),
        left=ends[_SECOND] - starts[_SECOND],
    )


def _covers(most: tuple[float, float, float], least: tuple[float, float, float]) -> bool:
    """Return whether a moment has at least as much of each; torch completes gradients of an operation in any order."""
    return most[0] >= least[0] and most[1] >= least[1] and sum(most[1:]) >= sum(least[1:])


def _common_bytes(some: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that some tensors share with others."""
    found = {id(storage): storage for tensor in some for storage in storages(tensor)}
    shared = {id(storage) for tensor in others for storage in storages(tensor)} & found.keys()
    return sum(found[each].nbytes() for each in shared)
