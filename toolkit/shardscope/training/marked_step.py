"""One traced training step of a module, with marks at the passes of its units; see `shardscope.training.step_trace`."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardscope.spec.model.step import AxisMessage, Moment, Phase
from shardscope.training.data.batches import call
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import AllocationLedger, Scratch, leaf_tensors
from shardscope.training.memory.replay import HandedOn, StepMark, highest, mark_of, replay
from shardscope.training.memory.storages import Storages, storages
from shardscope.training.tensor.axis import Message, recording


class MarkedStep:
    """One traced training step of a module; adds a `StepMark` to the ledger's events after each operation."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        units: Sequence[nn.Module],
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        casts: Callable[[], AbstractContextManager[Any]],
        scratch: Callable[[Any, Any, Any], Sequence[Scratch]],
        loss: Callable[[Any], Tensor] | None,
        targets: Any,
    ) -> None:
        self.module, self.inputs, self.units, self.loss = module, inputs, units, loss
        self.autocast, self.casts = autocast, casts
        self.owner = {id(parameter): 0 for parameter in module.parameters()}
        for number in range(len(units), 0, -1):  # the first unit that uses a parameter completes its gradient
            self.owner |= {id(parameter): number for parameter in units[number - 1].parameters()}
        held = Storages()
        held.add("held", [*module.parameters(), *module.buffers(), *leaf_tensors((inputs, targets))])
        self.mark = StepMark("forward", 0, 0)
        self.most_saved: dict[StepMark, int] = defaultdict(int)
        self.ledger = AllocationLedger(held, self._note, scratch)
        self.saved = Activations(held, changed=lambda _: self._see_saved(self.mark))
        self.output_bytes = self.num_outputs = self.loss_bytes = 0
        self.forward_operations = self.forward_bytes = self.product_elements = self.weight_elements = 0
        self._places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
        self._arrived: dict[int, None] = {}
        self.messages: tuple[AxisMessage, ...] = ()
        self._taken: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}
        self._left: dict[StepMark, int] = {}
        self._given: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}

    @property
    def gradient_order(self) -> tuple[int, ...]:
        """Indices of the parameters in ``module.parameters()``, in the order in which their gradients are complete."""
        return tuple(self._arrived)

    def run(self, samples: int) -> tuple[Moment, ...]:
        """Run the step, and return the moments of highest memory use: the Pareto maxima that `highest` selects."""
        for number, unit in enumerate(self.units, 1):
            self._watch(unit, number)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._placed)
        with recording() as called, self.ledger, self.saved.active(), self.casts():
            loss = self._loss()
            self.forward_operations, self.forward_bytes = self.ledger.num_operations, self.ledger.moved_bytes
            self.product_elements, self.weight_elements = (
                self.ledger.product_elements, self.ledger.weight_elements,
            )  # fmt: skip
            self.note("loss", 0, 0)
            loss.backward()
        self.messages = per_sample(called, samples)
        self.note("leave", 0, self.mark.done)
        if self.mark.unit:  # the unit's inputs need no gradient, so no hook has marked its end
            self.note("leave", self.mark.unit, self.mark.done)
        found = highest(replay(self.ledger, len(self.units), samples))
        return tuple(
            each.replace(saved=self.most_saved[mark] / samples, inputs=self._left.get(mark, 0) / samples)
            for each in found
            for mark in [mark_of(each)]
        )

    def note(self, phase: Phase, unit: int, done: int) -> None:
        """Record a mark between two operations."""
        mark = StepMark(phase, unit, done)
        self._left[mark] = _alive(self._taken.get(unit, ()))
        self._mark(mark)

    def _note(self) -> None:
        self._mark(self.mark)

    def _mark(self, mark: StepMark) -> None:
        self.ledger.events += [HandedOn(_alive(self._given.get(mark.unit, ()))), mark]
        self._see_saved(mark)

    def _see_saved(self, mark: StepMark) -> None:
        self.most_saved[mark] = max(self.most_saved[mark], self.saved.bytes)

    def _placed(self, parameter: nn.Parameter) -> None:
        self._arrived.setdefault(self._places[id(parameter)])
        self.ledger.place(parameter, self.owner[id(parameter)])

    def _loss(self) -> Tensor:
        with self.autocast():  # of both, as in training: until its end it keeps the weights that it has cast
            return self._of_output(call(self.module, self.inputs))

    def _of_output(self, output: Any) -> Tensor:
        scores = [leaf for leaf in leaf_tensors(output) if leaf.requires_grad]
        if not scores:
            raise ValueError("its output does not require grad, so there is no training step to trace")
        self.output_bytes = sum(leaf.nbytes for leaf in scores)
        self.num_outputs = sum(leaf.numel() for leaf in scores)
        if self.loss is not None:
            return self._given_loss(output, scores, self.loss)
        loss: Tensor = _Loss.apply(self, *scores)  # type: ignore[no-untyped-call]
        return loss

    def _given_loss(self, output: Any, scores: list[Tensor], loss: Callable[[Any], Tensor]) -> Tensor:
        """Compute the user's loss, with hooks that mark where its backward pass ends and the module's begins."""
        for tensor in scores:
            tensor.register_hook(lambda _: self._enter_backward())
        self.mark = StepMark("loss", 0, 0)
        before = self.saved.bytes
        value = loss(output)
        self.loss_bytes = self.saved.bytes - before
        return value

    def _enter_backward(self) -> None:
        """Mark the point at which the backward pass moves from the loss to the module."""
        if self.mark.phase == "loss":
            self.note("turn", 0, 0)
            self.mark = StepMark("backward", 0, 0)

    def _watch(self, unit: nn.Module, number: int) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, shape = tree_flatten((args, kwargs))
            self._taken[number] = self._storages(leaf_tensors(leaves))
            self.note("enter", number, number - 1)
            self.mark = StepMark("forward", number, number - 1)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if places:
                passed = _Passage.apply(self, number, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
                leaves = list(leaves)
                for i, tensor in zip(places, passed, strict=True):
                    leaves[i] = tensor
            return tree_unflatten(leaves, shape)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.mark = StepMark("forward", 0, number)
            self._given[number] = self._storages(leaf_tensors(output))
            for tensor in leaf_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._start_backward, number))

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(leave)

    def _storages(self, tensors: Sequence[Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
        """Return the storages of tensors, each once, without those that exist during the whole step."""
        found = {id(storage): storage for tensor in tensors for storage in storages(tensor)}
        return [weakref.ref(each) for each in found.values() if each not in self.ledger.held]

    def _start_backward(self, number: int, gradient: Tensor) -> None:
        """Mark the start of a unit's backward pass."""
        self._given[number] += self._storages([gradient])
        begun = StepMark("backward", number, len(self.units) - number)
        if self.mark != begun:
            self.note("turn", begun.unit, begun.done)
            self.mark = begun

    def passed(self, number: int) -> None:
        """Mark the end of a unit's backward pass."""
        done = len(self.units) - number
        self.note("leave", number, done)
        self.mark = StepMark("backward", 0, done + 1)


class _Passage(Function):
    """Identity function whose backward runs when the gradients of all its tensors are complete."""

    @staticmethod
    def forward(ctx: Any, step: MarkedStep, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.number = step, number
        return tuple(tensor.detach() for tensor in tensors)  # which a unit may change in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.step.passed(ctx.number)
        return None, None, *gradients


class _Loss(Function):
    """Placeholder for a loss function, whose backward only allocates gradients with the shapes of the outputs."""

    @staticmethod
    def forward(ctx: Any, step: MarkedStep, *scores: Tensor) -> Tensor:
        ctx.step, ctx.like = step, [(tensor.shape, tensor.dtype, tensor.device) for tensor in scores]
        return torch.zeros((), device=scores[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        step: MarkedStep = ctx.step
        step.mark = StepMark("backward", 0, 0)
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        step.note("turn", 0, 0)
        return None, *gradients


def _alive(found: Iterable[weakref.ref[torch.UntypedStorage]]) -> int:
    """Return the bytes of the storages that have not been freed."""
    alive = {id(storage): storage for each in found if (storage := each()) is not None}
    return sum(storage.nbytes() for storage in alive.values())


def per_sample(called: Iterable[Message], samples: int) -> tuple[AxisMessage, ...]:
    """Return collectives of layers with the bytes of one sample."""
    return tuple(
        AxisMessage(axis=each.axis, op=each.op, phase=each.phase, fixed_bytes=each.num_bytes)
        if each.is_fixed
        else AxisMessage(axis=each.axis, op=each.op, phase=each.phase, sample_bytes=each.num_bytes / samples)
        for each in called
    )
