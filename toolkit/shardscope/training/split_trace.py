"""What a layer sends and keeps if its backward pass is split into one for inputs and one for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardscope.spec.model.step import Moment, SplitBackward
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import AllocationLedger, Scratch, leaf_tensors
from shardscope.training.memory.replay import StepMark, replay
from shardscope.training.memory.storages import Storages, storages
from shardscope.training.recompute import recomputes_blocks
from shardscope.training.tensor.axis import Message, recording

SPLIT_ERRORS = (RuntimeError, KeyError)
"""Errors of PyTorch, or of a layer's own backward pass, if that cannot be split."""
_FOR_INPUTS, _FOR_WEIGHTS = 0, 1


class SplitPasses(NamedTuple):
    """The passes of one layer whose backward pass is split; bytes are those of one sample."""

    messages: tuple[Message, ...] = ()
    """Collectives of the forward pass, of the pass for inputs, and of that for weights."""
    grown: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """By how much the saved bytes grow; see `PipelinePiece.recompute_split`."""
    memory: SplitBackward = SplitBackward()


def split_passes(
    layer: nn.Module,
    forward: Callable[[], Any],
    inputs: Sequence[Tensor],
    samples: int,
    scratch: Callable[[Any, Any, Any], Sequence[Scratch]] = lambda *_: (),
) -> SplitPasses | str:
    """Run the passes of a layer whose backward pass is split; return the error's first line if that fails.

    The results of the layer stay, as those that the next layer of a stage takes. So does its graph until the pass for
    weights, and during that unless the pass has then freed all later layers.

    Args:
        layer: The layer.
        forward: Function that runs its forward pass.
        inputs: Tensors that the layer takes.
        samples: Number of samples in them.
        scratch: Function that returns the workspace of an operation; see `AllocationLedger`.
    """
    passes = _Passes(layer, inputs, scratch)
    with passes.ledger, passes.saved.active(), recording() as called:
        outputs = [tensor for tensor in leaf_tensors(forward()) if tensor.requires_grad]
        if not outputs:
            return SplitPasses(tuple(called))
        try:
            late = passes.run(outputs)
        except SPLIT_ERRORS as error:
            return reason_of(error)
        finally:
            for parameter in layer.parameters():
                parameter.grad = None
    messages = (*called, *(each._replace(phase="weights") for each in late))
    for_inputs, between, for_weights = (size / samples for size in passes.grown)
    rows = [*zip(replay(passes.ledger, 0, samples), passes.groups, strict=True)]
    memory = _memory(rows, passes.of_output / samples, in_reverse=recomputes_blocks(layer))
    return SplitPasses(messages, (for_inputs, between, for_weights), memory)


def reason_of(error: BaseException) -> str:
    """Return the type and the first line of the error that PyTorch's error in a split backward pass wraps."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {str(cause).strip()}".splitlines()[0].rstrip(".")


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
        self.left: list[set[int]] = []
        self.group = 0
        self.groups: list[int] = []
        self.grown = (0, 0, 0)
        self.of_output = 0

    def run(self, outputs: list[Tensor]) -> list[Message]:
        """Run both backward passes from the outputs, and return the collectives of the pass for weights."""
        from shardscope.training._compat_pipelining import (
            one_pass_for_weights,
            stage_backward_input,
            stage_backward_weight,
        )

        saved = self.saved
        ends = [tensor.clone() for tensor in outputs]  # views cannot be detached
        gradients: list[Tensor] = [torch.empty_like(tensor) for tensor in ends]
        before = saved.peak = saved.bytes
        self._begin(_FOR_INPUTS)
        found, groups = stage_backward_input(ends, gradients, [*self.inputs], self.layer.parameters())
        for_inputs, between = saved.peak, saved.bytes
        del found
        self.left = [{id(node.variable) for node in group["params"]} for group in groups]
        delayed = [tensor for group in groups for tensor in leaf_tensors(group.get("grads"))]
        self.of_output = _common_bytes(gradients, delayed)
        del delayed
        for tensor in self.inputs:
            tensor.grad = None
        self._end(_FOR_INPUTS)
        self._begin(_FOR_WEIGHTS)
        if recomputes_blocks(self.layer):
            outputs[:] = [tensor.detach() for tensor in outputs]
        saved.peak = saved.bytes
        with recording() as late, one_pass_for_weights(self.layer, groups) as ordered:
            del groups
            stage_backward_weight(self.layer.parameters(), ordered)
            self._end(_FOR_WEIGHTS)
        self.grown = (for_inputs - before, between - before, saved.peak - before)
        return late

    def _begin(self, number: int) -> None:
        self._add(StepMark("turn", number, 0))
        self.mark = StepMark("backward", number, 0)

    def _end(self, number: int) -> None:
        self.mark = None
        self._place()
        self._add(StepMark("leave", number, 0))

    def _place(self) -> None:
        """Note the gradients that PyTorch has computed, which it sets for a group of parameters at once."""
        for place, parameter in enumerate(self.layer.parameters()):
            if parameter.grad is None or place in self.placed:
                continue
            self.placed.add(place)
            self.ledger.place(parameter, 0)
        sizes = {id(each): each.nbytes for each in self.layer.parameters() if each.grad is not None}
        for group in [each for each in self.left if each <= sizes.keys()]:
            self.left.remove(group)
            self.group = sum(sizes[each] for each in group)

    def _note(self) -> None:
        if self.mark is not None:
            self._place()
            self._add(self.mark)

    def _add(self, mark: StepMark) -> None:
        self.ledger.events.append(mark)
        self.groups.append(self.group)


def _memory(rows: Sequence[tuple[Moment, int]], of_output: float, *, in_reverse: bool) -> SplitBackward:
    """Return the memory of both backward passes from their moments, whose `unit` is the number of the pass, with the
    bytes of the gradients computed last.
    """
    starts, ends = (
        {row.unit: row.activations for row, _ in rows if row.phase == phase} for phase in ("turn", "leave")
    )
    for_weights = {
        (row.activations - starts[_FOR_WEIGHTS], row.arriving, row.around, float(group))
        for row, group in rows
        if row.unit == _FOR_WEIGHTS and row.phase == "backward"
    }
    return SplitBackward(
        for_inputs=max(row.activations for row, _ in rows if row.unit == _FOR_INPUTS) - starts[_FOR_INPUTS],
        between=ends[_FOR_INPUTS] - starts[_FOR_INPUTS],
        of_output=of_output,
        for_weights=tuple(
            sorted(
                row
                for row in for_weights
                if not any(other != row and _covers(other, row) for other in for_weights)
            )
        ),
        left=ends[_FOR_WEIGHTS] - starts[_FOR_WEIGHTS],
        last_group=rows[-1][1],
        in_reverse=in_reverse,
    )


def _covers(most: Sequence[float], least: Sequence[float]) -> bool:
    """Return whether a moment has at least as much of each; torch completes gradients of an operation in any order."""

    def amounts(row: Sequence[float]) -> tuple[float, ...]:
        activations, computed, complete, last = row
        return activations, computed, computed + complete, computed + last

    return all(a >= b for a, b in zip(amounts(most), amounts(least), strict=True))


def _common_bytes(some: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """Return the bytes of the storages that some tensors share with others."""
    found = {id(storage): storage for tensor in some for storage in storages(tensor)}
    shared = {id(storage) for tensor in others for storage in storages(tensor)} & found.keys()
    return sum(found[each].nbytes() for each in shared)
