"""Traces how much memory a module's training step uses at each moment, from shapes and without real data.

The forward pass, the loss (or a placeholder) and the backward pass run on fake tensors, once for each recomputation
mode. The start and the end of each sharding unit's backward pass are marked as in FSDP2: hooks on the gradients of a
unit's outputs run when its backward pass starts, and the backward of an identity function around its inputs runs when
its backward pass ends. If no loss is given, Shardscope's memory formulas add the memory that a loss function uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from shardscope.errors import SpecError
from shardscope.spec.model.step import (
    RECOMPUTE_MODES,
    AxisMessage,
    Moment,
    ParameterRow,
    PipelinePiece,
    StepTrace,
)
from shardscope.training.data.batches import call
from shardscope.training.equal_layers import LayerCall
from shardscope.training.flops import flop_counter
from shardscope.training.marked_step import MarkedStep, per_sample
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import Scratch, leaf_tensors
from shardscope.training.memory.storages import Storages, num_bytes
from shardscope.training.models import units_of
from shardscope.training.models.in_order import Layers, can_be_sent, layers_in_order
from shardscope.training.models.mixture import divided_experts
from shardscope.training.recompute import RecomputeMode, apply_recompute
from shardscope.training.results import as_result
from shardscope.training.sequence import passing
from shardscope.training.split_trace import SplitPasses, split_passes
from shardscope.training.tensor.axis import recording
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
    run = partial(MarkedStep, autocast=autocast, casts=casts, scratch=scratch, loss=loss, targets=targets)
    modules = {mode: apply_recompute(make(), mode) for mode in modes}
    steps = {mode: run(module, inputs, units_of(module)) for mode, module in modules.items()}
    moments = {mode: step.run(samples) for mode, step in steps.items()}
    plain = steps["none"]
    names = {id(module): name for name, module in plain.module.named_modules()}
    experts = {id(p) for p in divided_experts(plain.module)}
    divided = {id(p) for p in divided_parameters(plain.module)} | experts
    whole = {name for step in steps.values() for name, _ in _layers(step.module)}
    pieces = _pieces(make(), inputs, samples, autocast, whole)
    passes = {
        mode: _piece_passes(
            apply_recompute(make(), mode), inputs, samples, autocast, whole=whole, scratch=scratch
        )
        for mode in modes
        if pieces
    }
    trace = StepTrace(
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
        pieces=_with_passes(pieces, passes, samples),
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
    if not trace.pieces or all(trace.pieces_of_units(mode) for mode in modes):
        return trace

    def by_layer(mode: RecomputeMode, *, flows: bool) -> tuple[Moment, ...]:
        module = _InTurn(apply_recompute(make(), mode), inputs, whole, flows=flows)
        return run(module, inputs, [*module.layers]).run(samples)

    return trace.replace(
        layer_moments={mode: by_layer(mode, flows=False) for mode in modes},
        flowing_moments={mode: by_layer(mode, flows=True) for mode in modes} if trace.first_trained else {},
    )


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
) -> tuple[PipelinePiece, ...]:
    """Run the module layer by layer, and return the memory and FLOPs of each layer; none if no pipeline can run it."""
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    buffers = {id(buffer): place for place, buffer in enumerate(module.buffers())}
    batch = {_key(tensor) for tensor in leaf_tensors(inputs)}
    x: Any = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    found = list[PipelinePiece]()
    for _, layer in _layers(module, whole):
        if found and not can_be_sent(x):  # such as a tuple, which nn.Sequential does not unpack
            return ()
        x = tree_map_only(Tensor, as_result, tree_map_only(Tensor, _leaf, x))
        kept = {_key(each): each.untyped_storage() for each in leaf_tensors(x) if _key(each) not in batch}
        held = batch | {_key(parameter) for parameter in layer.parameters()}

        def save(tensor: Tensor, kept: dict[int, Any] = kept, held: set[int] = held) -> Tensor:
            if _key(tensor) not in held:
                kept[_key(tensor)] = tensor.untyped_storage()
            return tensor

        counter = flop_counter()
        with autocast(), passing(module, inputs), counter, saved_tensors_hooks(save, lambda tensor: tensor):
            x = call(layer, x)
        found.append(
            PipelinePiece(
                output_bytes=sum(map(num_bytes, leaf_tensors(x))) / samples,
                flops=counter.get_total_flops() / samples,
                stored_bytes=sum(storage.nbytes() for storage in kept.values()) / samples,
                parameters=tuple(dict.fromkeys(places[id(p)] for p in layer.parameters() if id(p) in places)),
                buffers=tuple(dict.fromkeys(buffers[id(b)] for b in layer.buffers() if id(b) in buffers)),
            )
        )
    return tuple(found)


class _InTurn(nn.Module):
    """The layers of a model, each in a module of its own, although a model may call a layer twice.

    Args:
        model: The model.
        inputs: Its arguments.
        whole: See `_layers`.
        flows: Whether the output of the first layer requires a gradient in any case, as does a stage's input.
    """

    def __init__(self, model: nn.Module, inputs: Arguments, whole: Collection[str], *, flows: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(layer) for _, layer in _layers(model, whole))
        self.passing = partial(passing, model, inputs)
        self.flows = flows

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Return the output of the last layer; the first takes the model's inputs."""
        first, *others = self.layers
        with self.passing():
            x = first(*inputs, **named_inputs)
            if self.flows and not any(tensor.requires_grad for tensor in leaf_tensors(x)):
                x = tree_map_only(Tensor, as_result, tree_map_only(Tensor, _leaf, x))
            for layer in others:
                x = call(layer, x)
        return x


class _Layer(nn.Module):
    """A module around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the layer."""
        return self.layer(*inputs, **named_inputs)


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
                x = call(layer, tree_map_only(Tensor, as_result, tree_map_only(Tensor, _leaf, given)))
            saved.peak = kept = saved.bytes
            outputs = [tensor for tensor in leaf_tensors(x) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
        layer.zero_grad(set_to_none=True)
        taken = tree_map_only(Tensor, _leaf, given)

        def forward(layer: nn.Module = layer, taken: Any = taken) -> Any:
            with autocast():
                return call(layer, tree_map_only(Tensor, as_result, taken))

        with passing(module, inputs):
            split = split_passes(layer, forward, leaf_tensors(taken), samples, scratch)
        found.append(
            _PiecePasses(per_sample(called, samples), kept / samples, (saved.peak - kept) / samples, split)
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
                    mode: per_sample(each.messages, samples) for mode, each in split.items() if each.messages
                },
                recompute={mode: (row.saved, row.recomputed) for mode, row in rows.items() if mode != "none"},
                recompute_split={mode: each.grown for mode, each in split.items() if mode != "none"},
                split={mode: each.memory for mode, each in split.items()},
                not_split={mode: row.split for mode, row in rows.items() if isinstance(row.split, str)},
            )
        )
    return tuple(found)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - fake tensors have no address
