"""Finds layers that torch cannot compute in a 16-bit dtype on this processor, by trying a small layer of each kind.

Which kernels are available depends on the processor, the build of torch and its settings. For example, oneDNN has a
fused LSTM in bf16 only for processors with AVX-512, and torch has no other implementation under autocast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from shardscope.errors import SpecError
from shardscope.training.data import call
from shardscope.training.observe import random_state_kept
from shardscope.training.precision import Precision
from shardscope.training.twin import twin_of

_RECURRENT = {"LSTM": nn.LSTM, "GRU": nn.GRU}
_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_TRIED = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, _ConvNd, *_CELLS)


def uncomputable_layers(model: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Return torch's error for each layer of `model` that it cannot compute under CPU autocast to `dtype`, by name.

    Only layers with matrix products, convolutions or recurrence are tried, one small layer for each kind.
    """
    tried: dict[str, str] = {}
    with random_state_kept():
        for layer in model.modules():
            if isinstance(layer, _TRIED) and (kind := _kind(layer)) not in tried:
                tried[kind] = _error(layer, dtype)
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, _TRIED))
    return {name: error for name, layer in layers if (error := tried[_kind(layer)])}


def uncomputable_kinds(dtype: torch.dtype) -> list[str]:
    """Return the kinds of layers that torch cannot compute under CPU autocast to `dtype` on this processor."""
    layers = (
        nn.Linear(1, 1), nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1),
        nn.LSTM(1, 1), nn.GRU(1, 1), nn.RNN(1, 1), nn.MultiheadAttention(1, 1),
    )  # fmt: skip
    model = nn.ModuleDict({type(layer).__name__: layer for layer in layers})
    return [name for name in uncomputable_layers(model, dtype) if name in model]


def uncomputable(name: str, layer: nn.Module, error: str, precision: str) -> str:
    """Return the error message for a job whose model contains a layer that torch cannot compute."""
    return (
        f"torch cannot compute the layer {name or 'model'!r} ({type(layer).__name__}) with precision={precision!r} "
        f"on this processor ({error}); use precision='fp32', or switch off autocast for this layer"
    )


def require_computable(model: nn.Module, precision: Precision, inputs: Callable[[], Any]) -> None:
    """Reject a model that torch cannot run on this rank's device in the job's precision.

    A small instance of each kind of layer is tried first. If one fails, a copy of the model runs once on an example,
    because the model may call that layer outside autocast, without oneDNN, or not at all.

    Args:
        model: The whole model, on the rank's device.
        precision: The precision mode, as resolved for the rank's device.
        inputs: Returns an example for the model; called only if a layer fails.

    Raises:
        SpecError: The model runs a layer that torch cannot compute.
    """
    if precision.device.type != "cpu" or precision.compute_dtype == precision.weight_dtype:
        return
    failing = uncomputable_layers(model, precision.compute_dtype)
    twin = twin_of(model) if failing else None
    if twin is None:
        return
    try:
        with random_state_kept(), precision.autocast():
            call(twin, inputs())
    except RuntimeError as failure:
        for name, error in failing.items():
            if _in_short(failure) == error:
                raise SpecError(
                    uncomputable(name, model.get_submodule(name), error, precision.name)
                ) from failure
    except Exception:  # noqa: BLE001 - the user's own error, which the first step reports with its place
        return


@contextmanager
def called_under_autocast(model: nn.Module, names: Iterable[str]) -> Iterator[set[str]]:
    """Return a context manager that collects which named layers of `model`, or a copy, run under CPU autocast."""
    seen: set[str] = set()

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        def enter(_layer: nn.Module, _inputs: Any) -> None:
            if torch.is_autocast_enabled("cpu"):
                seen.add(name)

        return enter

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _kind(layer: nn.Module) -> str:
    """Return a text that differs between layers for which torch may have different kernels."""
    match layer:
        case nn.RNNBase():
            return f"{layer.mode} {layer.bias} {layer.bidirectional} {layer.proj_size > 0}"
        case _ConvNd():
            return f"conv {len(layer.kernel_size)} {layer.transposed} {layer.groups > 1} {layer.bias is not None}"
        case _:
            return next(kind.__name__ for kind in _TRIED if isinstance(layer, kind))


def _error(layer: nn.Module, dtype: torch.dtype) -> str:
    """Return torch's error in a forward and backward pass of a small layer of this kind; empty if there is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            with torch.device("cpu"), torch.autocast("cpu", dtype):
                found = _small_pass(layer)
            found.float().sum().backward()
    except RuntimeError as error:
        return _in_short(error)
    return ""


def _small_pass(layer: nn.Module) -> Tensor:
    """Return the output of a small layer of the same kind."""
    match layer:
        case nn.RNNBase():
            kind, extra = _RECURRENT.get(layer.mode, nn.RNN), {"proj_size": 1} if layer.proj_size else {}
            small = kind(2, 3, bias=layer.bias, bidirectional=layer.bidirectional, **extra)
            return _outputs(small, (4, 1, 2))
        case _ConvNd():
            name = f"Conv{'Transpose' * layer.transposed}{len(layer.kernel_size)}d"
            groups = 2 if layer.groups > 1 else 1
            small = getattr(nn, name)(2, 2, 3, groups=groups, bias=layer.bias is not None)
            return _outputs(small, (1, 2, *(4 for _ in layer.kernel_size)))
        case nn.MultiheadAttention():
            return _outputs(nn.MultiheadAttention(2, 1), (3, 1, 2), times=3)
        case nn.Bilinear():
            return _outputs(nn.Bilinear(2, 2, 2), (3, 2), times=2)
        case nn.Linear():
            return _outputs(nn.Linear(2, 2), (3, 2))
        case _:
            return _outputs(next(kind for kind in _CELLS if isinstance(layer, kind))(2, 3), (3, 2))


def _outputs(small: nn.Module, shape: tuple[int, ...], *, times: int = 1) -> Tensor:
    inputs = torch.ones(shape, dtype=torch.float32, requires_grad=True)
    found = small.to(torch.float32)(*[inputs] * times)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first


def _in_short(error: RuntimeError) -> str:
    """Return the first sentence of torch's message."""
    return str(error).strip().split("\n")[0].split(". ")[0]
