"""Traces how much memory a module's training step uses at each moment, from shapes and without real data.

The forward pass, the loss (or a placeholder) and the backward pass run on fake tensors, once for each recomputation
mode. The start and the end of each sharding unit's backward pass are marked as in FSDP2: hooks on the gradients of a
unit's outputs run when its backward pass starts, and the backward of an identity function around its inputs runs when
its backward pass ends. If no loss is given, Shardscope's memory formulas add the memory that a loss function uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardscope.errors import SpecError
from shardscope.spec.model.step import (
    RECOMPUTE_MODES,
    AxisMessage,
    Moment,
    ParameterRow,
    Phase,
    PipelinePiece,
    StepTrace,
)
from shardscope.training.data.batches import call
from shardscope.training.equal_layers import LayerCall
from shardscope.training.flops import flop_counter
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import AllocationLedger, Scratch, leaf_tensors
from shardscope.training.memory.replay import StepMark, highest, mark_of, replay
from shardscope.training.memory.storages import Storages, num_bytes
from shardscope.training.models import units_of
from shardscope.training.models.in_order import Layers, layers_in_order
from shardscope.training.models.mixture import divided_experts
from shardscope.training.recompute import RecomputeMode, apply_recompute
from shardscope.training.sequence import passing
from shardscope.training.split_trace import SplitPasses, split_passes
from shardscope.training.tensor.axis import Message, recording
from shardscope.training.tensor.linear import divided_parameters

Arguments = tuple[Any, ...] | Mapping[str, Any]
"""Arguments of a module: a tuple of positional arguments, or a mapping of keyword arguments."""
AROUND = "(around the units)"


def trace_step(
    make: Callable[[], nn.Module],
    inputs: Arguments,
    samples: int,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    casts: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scratch: Callable[[Any, Any, Any], Sequence[Scratch]] = lambda *_: (),
    loss: Callable[[Any], Tensor] | None = None,
    targets: Any = None,
    recompute: Iterable[RecomputeMode] = RECOMPUTE_MODES,
) -> StepTrace:
    """Trace the memory of a training step. Must be called within `FakeTensorMode`.

    Memory that grows with the batch, such as activations, is given in bytes per sample; other memory in bytes.

    Args:
        make: Function that returns a new copy of the module with fake tensors.
        inputs: Arguments for the module, as fake tensors.
        samples: Number of samples in the inputs.
        autocast: Function that returns the context manager in which the forward pass and the loss run.
        casts: Function that returns a context manager for the whole step, which may change what autocast does.
        scratch: Function that returns the workspace of an operation; see `AllocationLedger`.
        loss: Function from the module's output to the loss; None for a placeholder that saves no tensors.
        targets: Tensors that the loss reads, which are not counted, like the inputs.
        recompute: Recomputation modes, each traced in a step of its own; ``"none"`` is always included.
    """
    modes: dict[RecomputeMode, None] = dict.fromkeys(("none", *recompute))
    steps = {
        mode: _Step(make(), inputs, mode, autocast, casts=casts, scratch=scratch, loss=loss, targets=targets)
        for mode in modes
    }
    moments = {mode: step.run(samples) for mode, step in steps.items()}
    plain = steps["none"]
    names = {id(module): name for name, module in plain.module.named_modules()}
    experts = {id(p) for p in divided_experts(plain.module)}
    divided = {id(p) for p in divided_parameters(plain.module)} | experts
    whole = {name for step in steps.values() for name, _ in _layers(step.module)}
    return StepTrace(
        units=(AROUND, *(names[id(unit)] for unit in plain.units)),
        parameters=tuple(
            ParameterRow(
                unit=plain.owner[id(p)],
                shape=tuple(p.shape),
                is_trained=p.requires_grad,
                is_divided=id(p) in divided,
                is_expert=id(p) in experts,
            )
            for p in plain.module.parameters()
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in plain.module.buffers()),
        buffer_sizes=tuple(buffer.nbytes for buffer in plain.module.buffers()),
        output_bytes=plain.output_bytes / samples,
        num_outputs=plain.num_outputs // samples,
        gradient_order=plain.gradient_order,
        pieces=_with_passes(
            tuple(_pieces(make(), inputs, samples, autocast, whole)),
            {
                mode: _piece_passes(
                    apply_recompute(make(), mode), inputs, samples, autocast, whole=whole, scratch=scratch
                )
                for mode in modes
            },
            samples,
        ),
        moments=moments,
        messages={mode: step.messages for mode, step in steps.items() if step.messages},
        saved_bytes={} if loss is None else {mode: step.saved.peak / samples for mode, step in steps.items()},
        loss_bytes=plain.loss_bytes / samples,
        num_operations=plain.ledger.num_operations,
        moved_bytes=plain.ledger.moved_bytes / samples,
        forward_operations=plain.forward_operations,
        forward_bytes=plain.forward_bytes / samples,
        product_elements=plain.product_elements / samples,
        weight_elements=plain.weight_elements,
        largest_bytes=plain.ledger.largest_bytes / samples,
    )


class _Step:
    """One traced training step of a module; adds a `StepMark` to the ledger's events after each operation."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Arguments,
        mode: RecomputeMode,
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        casts: Callable[[], AbstractContextManager[Any]],
        scratch: Callable[[Any, Any, Any], Sequence[Scratch]],
        loss: Callable[[Any], Tensor] | None,
        targets: Any,
    ) -> None:
        self.module, self.inputs, self.loss = apply_recompute(module, mode), inputs, loss
        self.autocast, self.casts = autocast, casts
        self.units = units_of(module)
        self.owner = {id(parameter): 0 for parameter in module.parameters()}
        self.owner |= {id(p): number for number, unit in enumerate(self.units, 1) for p in unit.parameters()}
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
        self.messages = _per_sample(called, samples)
        self.note("leave", 0, self.mark.done)
        if self.mark.unit:  # the unit's inputs need no gradient, so no hook has marked its end
            self.note("leave", self.mark.unit, self.mark.done)
        found = highest(replay(self.ledger, len(self.units), samples))
        return tuple(each.replace(saved=self.most_saved[mark_of(each)] / samples) for each in found)

    def note(self, phase: Phase, unit: int, done: int) -> None:
        """Record a mark between two operations."""
        self._mark(StepMark(phase, unit, done))

    def _note(self) -> None:
        self._mark(self.mark)

    def _mark(self, mark: StepMark) -> None:
        self.ledger.events.append(mark)
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
            self.note("enter", number, number - 1)
            self.mark = StepMark("forward", number, number - 1)
            leaves, shape = tree_flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if places:
                passed = _Passage.apply(self, number, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
                leaves = list(leaves)
                for i, tensor in zip(places, passed, strict=True):
                    leaves[i] = tensor
            return tree_unflatten(leaves, shape)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self.mark = StepMark("forward", 0, number)
            for tensor in leaf_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._start_backward(number))

        unit.register_forward_pre_hook(enter, with_kwargs=True)
        unit.register_forward_hook(leave)

    def _start_backward(self, number: int) -> None:
        """Mark the start of a unit's backward pass."""
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
    def forward(ctx: Any, step: _Step, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.number = step, number
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.step.passed(ctx.number)
        return None, None, *gradients


class _Loss(Function):
    """Placeholder for a loss function, whose backward only allocates gradients with the shapes of the outputs."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *scores: Tensor) -> Tensor:
        ctx.step, ctx.like = step, [(tensor.shape, tensor.dtype, tensor.device) for tensor in scores]
        return torch.zeros((), device=scores[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        step: _Step = ctx.step
        step.mark = StepMark("backward", 0, 0)
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        step.note("turn", 0, 0)
        return None, *gradients


def _layers(module: nn.Module, whole: Collection[str] = ()) -> Layers:
    """Return the layers between which a pipeline can split a module; empty if it cannot be split.

    Args:
        module: The module.
        whole: Names of the layers in all recomputation modes. A nested `nn.Sequential` that is recomputed as a whole is
            one layer, and thus also counts as one where it is not recomputed.
    """
    try:
        return layers_in_order(module, whole=whole)
    except SpecError:
        return []


def _pieces(
    module: nn.Module,
    inputs: Arguments,
    samples: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    whole: Collection[str],
) -> Iterator[PipelinePiece]:
    """Run the module layer by layer, and yield the memory and FLOPs of each layer, for pipelines."""
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    buffers = {id(buffer): place for place, buffer in enumerate(module.buffers())}
    batch = {_key(tensor) for tensor in leaf_tensors(inputs)}
    x: Any = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    for _, layer in _layers(module, whole):
        x = tree_map_only(Tensor, _result, tree_map_only(Tensor, _leaf, x))
        kept = {_key(each): each.untyped_storage() for each in leaf_tensors(x) if _key(each) not in batch}
        held = batch | {_key(parameter) for parameter in layer.parameters()}

        def save(tensor: Tensor, kept: dict[int, Any] = kept, held: set[int] = held) -> Tensor:
            if _key(tensor) not in held:
                kept[_key(tensor)] = tensor.untyped_storage()
            return tensor

        counter = flop_counter()
        with autocast(), passing(module, inputs), counter, saved_tensors_hooks(save, lambda tensor: tensor):
            x = call(layer, x)
        yield PipelinePiece(
            output_bytes=sum(map(num_bytes, leaf_tensors(x))) / samples,
            flops=counter.get_total_flops() / samples,
            stored_bytes=sum(storage.nbytes() for storage in kept.values()) / samples,
            parameters=tuple(dict.fromkeys(places[id(p)] for p in layer.parameters() if id(p) in places)),
            buffers=tuple(dict.fromkeys(buffers[id(b)] for b in layer.buffers() if id(b) in buffers)),
        )


class _PiecePasses(NamedTuple):
    """What the forward and backward pass of one layer send and save, for one sample."""

    messages: tuple[AxisMessage, ...]
    saved: float
    """Bytes saved by the forward pass."""
    recomputed: float
    """Bytes by which these grow in the backward pass, at most."""
    split: SplitPasses | str
    """The same if the backward pass is split; the error if that fails."""


def _piece_passes(
    module: nn.Module,
    inputs: Arguments,
    samples: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    whole: Collection[str],
    scratch: Callable[[Any, Any, Any], Sequence[Scratch]],
) -> list[_PiecePasses]:
    """Run the passes of a module layer by layer, and return what each layer sends and saves."""
    found, held = list[_PiecePasses](), Storages()
    held.add("held", [*module.parameters(), *module.buffers(), *leaf_tensors(inputs)])
    x: Any = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    before: LayerCall | None = None
    for _, layer in _layers(module, whole):
        this = LayerCall(layer, x)
        if before and this.equals(before):  # such as the next of many blocks, whose passes would be the same
            found.append(found[-1])
            continue
        before, saved, given = this, Activations(held), x
        with recording() as called, saved.active():
            with autocast(), passing(module, inputs):
                x = call(layer, tree_map_only(Tensor, _result, tree_map_only(Tensor, _leaf, given)))
            saved.peak = kept = saved.bytes
            outputs = [tensor for tensor in leaf_tensors(x) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
        layer.zero_grad(set_to_none=True)
        taken = tree_map_only(Tensor, _leaf, given)

        def forward(layer: nn.Module = layer, taken: Any = taken) -> Any:
            with autocast():
                return call(layer, tree_map_only(Tensor, _result, taken))

        with passing(module, inputs):
            split = split_passes(layer, forward, leaf_tensors(taken), samples, scratch)
        found.append(
            _PiecePasses(_per_sample(called, samples), kept / samples, (saved.peak - kept) / samples, split)
        )
    return found


def _with_passes(
    pieces: tuple[PipelinePiece, ...], passes: Mapping[RecomputeMode, Sequence[_PiecePasses]], samples: int
) -> tuple[PipelinePiece, ...]:
    """Return the pieces with what each of them sends and saves, by recomputation mode."""
    found = []
    for place, piece in enumerate(pieces):
        rows = {mode: every[place] for mode, every in passes.items()}
        split = {mode: row.split for mode, row in rows.items() if not isinstance(row.split, str)}
        found.append(
            piece.replace(
                messages={mode: row.messages for mode, row in rows.items() if row.messages},
                split_messages={
                    mode: _per_sample(each.messages, samples) for mode, each in split.items() if each.messages
                },
                recompute={mode: (row.saved, row.recomputed) for mode, row in rows.items() if mode != "none"},
                recompute_split={mode: each.grown for mode, each in split.items() if mode != "none"},
                split={mode: each.memory for mode, each in split.items()},
                not_split={mode: row.split for mode, row in rows.items() if isinstance(row.split, str)},
            )
        )
    return tuple(found)


def _per_sample(called: Iterable[Message], samples: int) -> tuple[AxisMessage, ...]:
    """Return collectives of layers with the bytes of one sample."""
    return tuple(
        AxisMessage(axis=each.axis, op=each.op, phase=each.phase, fixed_bytes=each.num_bytes)
        if each.is_fixed
        else AxisMessage(axis=each.axis, op=each.op, phase=each.phase, sample_bytes=each.num_bytes / samples)
        for each in called
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _result(tensor: Tensor) -> Tensor:
    """Return the tensor as the result of a layer, which, unlike a leaf, the next layer may change in place."""
    return cast("Tensor", _Result.apply(tensor)) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Result(Function):
    """Identity function."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - fake tensors have no address
