"""Lists the layers of a module with their parameters, FLOPs and memory, by tracing shapes, without real data.

The module is copied without its data. The copy runs one forward pass on fake tensors, which have no data but report the
module's device, so that attention selects the same kernel and saves the same tensors as in a real run. Before and after
each layer, hooks read PyTorch's FLOP counter and Shardscope's count of the bytes saved for the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from shardscope.errors import SpecError
from shardscope.spec.model.step import RECOMPUTE_MODES
from shardscope.spec.model.table import LayerRow, LayerTable
from shardscope.spec.model.transformer import Transformer
from shardscope.training import cpu_scratch, cuda_scratch, onednn
from shardscope.training.architecture import Operations, without_dropout
from shardscope.training.cuda_casts import CudaCasts
from shardscope.training.data.batches import call
from shardscope.training.flops import flop_counter
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import leaf_tensors
from shardscope.training.memory.storages import Storages, num_bytes
from shardscope.training.real_results import RealResults
from shardscope.training.recompute import RecomputeMode
from shardscope.training.step_trace import Arguments, trace_step

OUTSIDE = "(outside the layers)"
"""Name of the table row for FLOPs, saved bytes and parameters that belong to no layer."""
_ONE_AT_A_TIME = RLock()
"""Lock held during a trace, because a trace may turn off oneDNN for the whole process."""
_UNCOUNTED = (
    "FLOPs and step time leave out {names}, for which there is no FLOP formula; register one with "
    "torch.utils.flop_counter.register_flop_formula"
)
_UNFUSED = (
    "Recurrent layers are counted as separate operations in every time step, as on a GPU without cuDNN; cuDNN fuses "
    "them, launches fewer kernels, and keeps other tensors"
)


def describe(
    module: nn.Module,
    example: Any,
    *,
    name: str | None = None,
    memory: bool = False,
    autocast: torch.dtype | None = None,
    on_gpu: bool = False,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    recompute: Iterable[RecomputeMode] = RECOMPUTE_MODES,
) -> LayerTable:
    """Return a table of the layers of `module`, in the order in which they run on `example`.

    Each row has the layer's number of parameters and, per sample, its FLOPs, the bytes that it saves for the backward
    pass, and the bytes of its output. The layers are the module's children, with every `nn.Sequential` and
    `nn.ModuleList` replaced by its own children.

    Args:
        module: The module to describe; it is not modified.
        example: Arguments for the module: a tensor, a tuple of arguments, or a mapping of keyword arguments. The
            first dimension of the first tensor is the number of samples.
        name: Name of the model; None for the name of the module's class.
        memory: Whether to also trace the memory of a training step.
        autocast: 16-bit dtype of the matrix products in the training step; None for the dtype of the weights.
        on_gpu: Whether the casts of autocast and the workspace of kernels are those of a GPU, although the module is
            traced on the CPU; see `CudaCasts` and `shardscope.training.cuda_scratch`.
        loss: Loss function of the training step, called with the module's output and `targets`; None for a placeholder
            that saves no tensors.
        targets: Targets for the samples in `example`.
        recompute: The recomputation modes to trace if `memory` is true.

    Raises:
        SpecError: `module` is not a module, the example contains no tensor, or the module cannot run without real data.

    Example:
        >>> table = describe(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.zeros(2, 4))
        >>> [(layer.name, layer.num_params, layer.flops) for layer in table.layers]
        [('0', 40, 64.0), ('1', 0, 0.0)]
    """
    if not isinstance(module, nn.Module):
        raise SpecError(f"module is a {type(module).__name__}; give an instance of torch.nn.Module")
    is_one = isinstance(example, PackedSequence) or not isinstance(example, tuple | Mapping)
    arguments = (example,) if is_one else example
    samples = _num_samples(arguments)
    try:
        with (
            _ONE_AT_A_TIME,
            FakeTensorMode(allow_non_fake_inputs=True),
            RealResults(),
            _kernels(on_gpu=on_gpu),
        ):
            inputs = _inputs(arguments, module)
            traced = _Trace(_shadow(module), inputs)
            rows = traced.run()
            transformer = traced.transformer(name or type(module).__name__, samples)
            if transformer is None and traced.operations.may_drop:
                traced.operations = without_dropout(_shadow(module), inputs)
                transformer = traced.transformer(name or type(module).__name__, samples)
            step = None
            if memory:
                (shapes,) = tuple(_inputs((targets,), module))
                step = trace_step(
                    lambda: _shadow(module), inputs, samples, autocast=_autocast(module, autocast),
                    casts=CudaCasts if on_gpu else nullcontext,
                    scratch=(cuda_scratch if on_gpu else cpu_scratch).scratch,
                    loss=None if loss is None else lambda output: loss(output, shapes),
                    targets=shapes, recompute=recompute,
                )  # fmt: skip
    except (RuntimeError, TypeError, ValueError) as error:
        reason = "; ".join([str(error).splitlines()[0], *getattr(error, "__notes__", [])])
        advice = (
            "pass padded input, since the lengths of a packed sequence are values"
            if any(isinstance(each, PackedSequence) for each in arguments)
            or "_pack_padded_sequence" in reason
            else "give an example that its forward accepts, or describe only a submodule whose forward does not depend "
            "on tensor values"
        )
        raise SpecError(
            f"module of type {type(module).__name__} does not run on shapes alone: {reason}; {advice}"
        ) from error
    return LayerTable(
        name=name or type(module).__name__,
        layers=tuple(row.layer(samples) for row in rows if not row.is_empty),
        step=step,
        as_transformer=transformer,
        notes=tuple(_notes(module, traced.flops.uncounted, on_gpu=on_gpu)),
    )


def _kernels(*, on_gpu: bool) -> AbstractContextManager[Any]:
    """Return a context manager in which recurrent layers run as on the job's device.

    On the CPU, an LSTM layer is one operation of oneDNN. GPUs lack this operation, so for a GPU the layer is traced as
    separate operations, which do not depend on the instruction set of this machine's CPU.
    """
    if not on_gpu:
        return onednn.OneDNN()
    off: AbstractContextManager[Any] = torch.backends.mkldnn.flags(
        enabled=False, deterministic=None, allow_tf32=None, fp32_precision=None
    )
    return off


def _notes(module: nn.Module, uncounted: Collection[str], *, on_gpu: bool) -> Iterator[str]:
    """Yield sentences on what the trace of a module leaves out."""
    if uncounted:
        yield _UNCOUNTED.format(names=", ".join(sorted(uncounted)))
    if on_gpu and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        yield _UNFUSED


def _autocast(module: nn.Module, dtype: torch.dtype | None) -> Callable[[], AbstractContextManager[Any]]:
    if dtype is None:
        return nullcontext
    device = next((device_of(parameter) for parameter in module.parameters()), torch.device("cpu"))
    return partial(torch.autocast, device.type, dtype=dtype)


def _num_samples(arguments: Arguments) -> int:
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0]:
            return leaf.shape[0]
    raise SpecError(
        "example contains no tensor whose first dimension is the number of samples; give one, such as "
        "torch.zeros(1, 64)"
    )


def _inputs(arguments: Arguments, module: nn.Module) -> Arguments:
    """Return the arguments with fake tensors on the module's device; a tensor passed twice becomes one fake tensor."""
    device = next((device_of(parameter) for parameter in module.parameters()), None)
    known: dict[int, Tensor] = {}

    def shape_of(tensor: Tensor) -> Tensor:
        return known.setdefault(id(tensor), _shape_only(tensor, device))

    shapes: Arguments = tree_map_only(Tensor, shape_of, arguments)
    return shapes


def _shape_only(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a new tensor with the same shape, strides and dtype; it is fake within `FakeTensorMode`."""
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or device_of(tensor)
    )


def device_of(tensor: Tensor) -> torch.device:
    """Return a tensor's device; the CPU for a meta tensor."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _shadow(module: nn.Module) -> nn.Module:
    """Return a deep copy of the module whose parameters, buffers and other tensors have no data."""
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        known[id(parameter)] = nn.Parameter(_shape_only(parameter), requires_grad=parameter.requires_grad)
    for tensor in (*module.buffers(), *_loose_tensors(module)):
        known.setdefault(id(tensor), _shape_only(tensor))  # an LSTM also has its parameters in an attribute
    return copy.deepcopy(module, known)


def _loose_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of the module and its submodules that are not registered as buffers."""
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@dataclass
class _LayerTotals:
    """Totals for one layer over all samples of the example."""

    name: str
    parameters: list[nn.Parameter]
    flops: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0

    @property
    def is_empty(self) -> bool:
        return self.name == OUTSIDE and not (self.parameters or self.flops or self.saved_bytes)

    def layer(self, samples: int) -> LayerRow:
        return LayerRow(
            name=self.name,
            num_params=sum(parameter.numel() for parameter in self.parameters),
            num_tensors=len(self.parameters),
            flops=self.flops / samples,
            saved_bytes=max(0.0, self.saved_bytes)
            / samples,  # what an earlier layer saved may be freed meanwhile
            output_bytes=self.output_bytes / samples,
        )


class _Trace:
    def __init__(self, module: nn.Module, inputs: Arguments) -> None:
        self.module, self.inputs = module, inputs
        self.flops = flop_counter()
        self.operations = Operations(module)
        held = [*module.buffers(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
        known = Storages()
        known.add("held", held)
        self.saved = Activations(known)
        self.outside = _LayerTotals(OUTSIDE, [])
        self.order: list[_LayerTotals] = []

    def run(self) -> list[_LayerTotals]:
        """Run the forward pass and return the rows.

        The rows of layers are in the order in which the layers first ran. Then come unused layers, and last the row
        `OUTSIDE`.
        """
        rows = [self._watched(name, layer) for name, layer in _layers_of(self.module)]
        self._own_parameters(rows)
        with self.flops, self.saved.active(), self.operations:
            output = call(self.module, self.inputs)
            self.outside.flops = self.flops.get_total_flops() - sum(row.flops for row in rows)
            self.outside.saved_bytes = self.saved.bytes - sum(row.saved_bytes for row in rows)
        del output
        return [*self.order, *(row for row in rows if row not in self.order), self.outside]

    def transformer(self, name: str, samples: int) -> Transformer | None:
        """Return the transformer that the module is, if all of its operations have a FLOP formula; else None."""
        if self.flops.uncounted:
            return None
        return self.operations.transformer(name, samples, self.flops.get_total_flops())

    def _watched(self, name: str, layer: nn.Module) -> _LayerTotals:
        row = _LayerTotals(name, [])
        before: list[tuple[float, float]] = []

        def enter(*_: Any) -> None:
            before.append((self.flops.get_total_flops(), self.saved.bytes))

        def leave(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            flops, saved = before.pop()
            row.flops += self.flops.get_total_flops() - flops
            row.saved_bytes += self.saved.bytes - saved
            row.output_bytes += sum(map(num_bytes, leaf_tensors(output)))
            if row not in self.order:
                self.order.append(row)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
        row.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        return row

    def _own_parameters(self, rows: list[_LayerTotals]) -> None:
        """Keep each parameter only in the first row that has it; add parameters of no layer to the row `OUTSIDE`."""
        seen: set[int] = set()
        for row in rows:
            row.parameters = [p for p in row.parameters if id(p) not in seen]
            seen |= {id(p) for p in row.parameters}
        self.outside.parameters = [
            p for p in self.module.parameters() if p.requires_grad and id(p) not in seen
        ]


def _layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, nn.ModuleList) or type(child).forward is nn.Sequential.forward:
            yield from _layers_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
