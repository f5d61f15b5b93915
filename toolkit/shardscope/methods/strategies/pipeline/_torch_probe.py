"""Measure the time and memory of each layer, and record the shape of its output, with one micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardscope.errors import SpecError
from shardscope.training.data import call, map_tensors
from shardscope.training.models.in_order import Layers, can_be_sent
from shardscope.training.results import as_result
from shardscope.training.tensors_in import tensors_in

REPEATS = 3
"""Number of measurements; the fastest is used, because disturbances only make measurements slower."""

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class LayerProbe:
    """Result of probing one layer with one micro-batch."""

    outputs: list[Tensor]
    """Output tensors, on the meta device: a single tensor, or for the last layer all tensors in its output."""
    stored_bytes: int
    """Bytes of activations saved for the backward pass."""
    seconds: float
    """Time of a forward and a backward pass in seconds; 0 if not measured."""
    flops: float = 0.0
    """FLOPs of a forward pass; 0 if not counted."""


def probe(
    model: nn.Module, layers: Layers, inputs: Any, autocast: Autocast, *, measure: bool, count: bool = False
) -> list[LayerProbe]:
    """Probe all layers in order, each with the output of the layer before it; the model is left unchanged.

    Args:
        model: The whole model.
        layers: Layers of the model, in order.
        inputs: Inputs of one micro-batch.
        autocast: Function that returns the autocast context of the job's precision.
        measure: Whether to measure times.
        count: Whether to count FLOPs.

    Raises:
        SpecError: A layer's output is not a floating-point tensor, which a pipeline cannot send or differentiate.
    """
    found, x = [], inputs
    device = next(tensor.device for tensor in tensors_in(inputs))
    with _untouched(model, device), autocast():
        for index, (name, layer) in enumerate(layers):
            x = map_tensors(_leaf, x)
            stored, y = _stored_bytes(layer, x)
            last = index == len(layers) - 1
            if not last and not can_be_sent(y):
                raise SpecError(
                    f"layer {name!r} returns {_kind(y)}, but a pipeline can only send a floating-point tensor; "
                    "combine this layer with the next one"
                )
            seconds = _seconds(layer, x) if measure else 0.0
            handed_on = [torch.empty_like(t, device="meta", requires_grad=False) for t in tensors_in(y)]
            found.append(LayerProbe(handed_on, stored, seconds, _flops(layer, x) if count else 0.0))
            x = y
    return found


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _kind(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _stored_bytes(layer: nn.Module, x: Any) -> tuple[int, Any]:
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors_in(x))}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # keep it alive, so that its address is not reused
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(layer, map_tensors(as_result, x))
    return sum(storage.nbytes() for storage in kept.values()), y


def _seconds(layer: nn.Module, x: Any) -> float:
    wanted = [tensor for tensor in (*tensors_in(x), *layer.parameters()) if tensor.requires_grad]
    device = wanted[0].device if wanted else torch.device("cpu")
    times = []
    for _ in range(REPEATS):
        _finish(device)
        start = time.perf_counter()
        results = [y for y in tensors_in(call(layer, map_tensors(as_result, x))) if y.requires_grad]
        if wanted and results:
            torch.autograd.grad(results, wanted, [torch.ones_like(y) for y in results], allow_unused=True)
        _finish(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _flops(layer: nn.Module, x: Any) -> float:
    from shardscope.training.flops import flop_counter  # a slow import, needed only here

    with flop_counter() as counter:
        call(layer, map_tensors(as_result, x))
    return float(counter.get_total_flops())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context that restores buffers (such as running statistics) and the random state when it ends."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, values in before:
        buffer.copy_(values)
