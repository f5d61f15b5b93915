"""LAMB's step on a GPU in launches of the Triton kernel: the layers of each launch, their order, and the settings.

A launch updates layers of one parameter group that have taken the same number of steps. Its tables stay on the device
from step to step, as long as the same parameters have a gradient. A step uploads nothing if all tensors have the same
addresses as before; if only gradients have moved, it uploads their new addresses. It never waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from shardscope.methods.optimizers.lamb._torch_loops import factors_of
from shardscope.methods.optimizers.lamb._triton import step_layers
from shardscope.methods.optimizers.lamb._visits import stages_of
from shardscope.training.optim._kernels import AdamMoments, Scalars
from shardscope.training.optim._layerwise import FlatViews, LayerBatch, LayerShard
from shardscope.training.optim.signals import Squares, UpdatedLayers
from shardscope.training.sharding import local

TILE = 1024
"""Elements per tile."""
NUM_WARPS = 4
"""Warps per program."""
PROGRAMS_PER_PROCESSOR = 6
"""Programs that run concurrently on each multiprocessor. With fewer programs, a layer's second visits follow its first
visits more closely, and more of the layer is still in the L2 cache; with too few, memory bandwidth is underused."""

DEVICES = {"cuda", "cpu"} if triton.knobs.runtime.interpret else {"cuda"}
"""Types of devices on which the kernel runs; Triton's interpreter, used in tests, accepts tensors in host memory."""

Held = tuple[Tensor, dict[str, Tensor]]
"""A parameter and its optimizer state."""


class Launch:
    """Layers of one parameter group with equal step counts, which the kernel updates together.

    Attributes:
        group: The parameter group.
        grads: The gradients of this step, until `release`.
        adapts: Whether the layers have trust ratios.
        squares: Sums of squares of weights and updates on the device, if the layers have trust ratios.
        updated: The layers, with the sums of squares and trust ratios that the last step has left on the device.

    Args:
        group: The parameter group.
        layers: The layers.
        held: Parameters and optimizer states of the layers. Their step counts are replaced by views of one tensor.
        is_sharded: Whether the layers' sums of squares are added over ranks between first and second visits.
    """

    def __init__(
        self, group: dict[str, Any], layers: Sequence[LayerShard], held: Sequence[Held], *, is_sharded: bool
    ) -> None:
        self.group, self.adapts = group, bool(group["adapt"])
        self.grads = [layer.grad for layer in layers]
        self._steps = torch.tensor([float(state["step"]) for _, state in held])
        for (_, state), step in zip(held, self._steps.unbind(), strict=True):
            state["step"] = step  # one addition then counts for all layers
        self._held = [(param, state, FlatViews.places_of(param, state)) for param, state in held]
        self._device = layers[0].weights.device
        self._num_programs = PROGRAMS_PER_PROCESSOR * _num_processors(self._device)
        self._epoch = 0
        num_tiles = np.array([max(1, math.ceil(layer.weights.numel() / TILE)) for layer in layers])
        self._fill_tables(layers, num_tiles, None if is_sharded else self._num_programs)
        names = [layer.name for layer in layers]
        of_weights, of_updates, ratios = self._results.unbind(dim=1)
        self.squares: Squares = of_weights, of_updates
        known = (self.squares, ratios) if self.adapts else (None, None)
        self.updated = UpdatedLayers(names, group, *known)

    def _fill_tables(
        self, layers: Sequence[LayerShard], num_tiles: npt.NDArray[np.int64], ahead: int | None
    ) -> None:
        firsts = np.cumsum(num_tiles, dtype=np.int64) - num_tiles
        rows = [
            (*addresses_of(layer), layer.weights.numel(), first)
            for layer, first in zip(layers, firsts, strict=True)
        ]
        self._rows = np.array(rows, dtype=np.int64)
        self._table = self._upload(self._rows)
        self._stages = [
            self._upload(stage) for stage in stages_of(num_tiles, adapts=self.adapts, ahead=ahead)
        ]
        self._partials = torch.empty(2 * int(num_tiles.sum()), device=self._device)
        self._counters = torch.zeros(2 + 2 * len(rows), dtype=torch.int32, device=self._device)
        self._results = torch.ones(len(rows), 3, dtype=torch.float64, device=self._device)
        self._one = torch.ones((), dtype=torch.float64, device=self._device)

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array.copy())
        return (
            tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
        )

    def fits(self) -> bool:
        """Return whether this step updates the same tensors as the last; if so, use their current gradients."""
        counts = self._steps.tolist()
        if self.adapts != self.group["adapt"] or counts.count(counts[0]) < len(counts):
            return False
        grads: list[Tensor] = []
        for param, state, places in self._held:
            grad = param.grad
            if grad is None or not is_plain(grad) or not param.is_contiguous():
                return False
            if places != FlatViews.places_of(param, state):
                return False
            grads.append(grad)
        self.grads = grads
        addresses = [grad.data_ptr() for grad in grads]
        if addresses != self._rows[:, 1].tolist():
            self._rows[:, 1] = addresses
            self._table = self._upload(self._rows)
        return True

    def count_step(self) -> None:
        """Increment the step counts of the layers."""
        self._steps.add_(1)
        self._epoch += 1

    def begin(self, grad_factor: Tensor | None) -> None:
        """Update the layers; if they are sharded, only their moments, and compute the shards' sums of squares.

        Args:
            grad_factor: Factor of the gradients, as a float64 number on a device; None for 1.
        """
        self._run(self._stages[0], grad_factor)

    def finish(self, squares: Squares, ratios: Scalars) -> None:
        """Update the weights of sharded layers, with trust ratios from the sums of squares over all ranks."""
        for own, values in zip(self._results.unbind(dim=1), (*squares, ratios), strict=True):
            own.copy_(torch.as_tensor(values))
        self._run(self._stages[1], None)

    def release(self) -> None:
        """Drop the gradients at the end of a step, so that their memory is free during the next forward pass."""
        self.grads = []

    def _run(self, visits: Tensor, grad_factor: Tensor | None) -> None:
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            step_layers[(min(self._num_programs, len(visits)),)](
                self._table, visits, self._partials, self._counters, self._results,
                self._one if grad_factor is None else grad_factor.to(self._device), len(visits), self._epoch,
                int(self.adapts), *self._factors(), tile_size=TILE, num_warps=NUM_WARPS,
            )  # fmt: skip

    def _factors(self) -> list[float]:
        """Return the kernel's arguments from `keep1` to `largest_ratio`, as floats: ints would cause recompilation."""
        group, is_inside = self.group, self.group["decay_form"] == "inside"
        moments = AdamMoments.of(group)
        (count,) = moments.counts([self._steps[0]])
        *factors, _ = factors_of(moments, count, group["weight_decay"] if is_inside else 0.0, 1.0)
        shrink = 0.0 if is_inside else group["lr"] * group["weight_decay"]
        clamp = math.inf if group["clamp"] is None else group["clamp"]
        bounds = clamp, 1.0 if group["trust_clip"] else math.inf
        return [float(value) for value in (*factors, shrink, group["lr"], *bounds)]


class KernelStep:
    """The launches that update all layers with a gradient.

    Args:
        batches: The layers, in the order of the parameters.
        held: Parameters and optimizer states of the layers.
        is_sharded: Whether the layers' sums of squares are added over ranks; see `Launch`.
    """

    def __init__(self, batches: Sequence[LayerBatch], held: Sequence[Held], *, is_sharded: bool) -> None:
        self._updated = [id(param) for param, _ in held]
        self.launches = [
            Launch(group, layers, own, is_sharded=is_sharded) for group, layers, own in _runs(batches, held)
        ]

    def fits(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether this step updates the same tensors as the last; if so, use their current gradients."""
        updated = [id(param) for group in groups for param in group["params"] if param.grad is not None]
        return updated == self._updated and all(launch.fits() for launch in self.launches)


def _runs(
    batches: Sequence[LayerBatch], held: Sequence[Held]
) -> Iterator[tuple[dict[str, Any], Sequence[LayerShard], Sequence[Held]]]:
    """Split the batches where the step count changes, and keep their order, which must be the same on all ranks."""
    rest = iter(held)
    for batch in batches:
        rows = list(zip(batch.layers, itertools.islice(rest, len(batch.layers)), strict=True))
        for _, run in itertools.groupby(rows, key=lambda row: float(row[1][1]["step"])):
            layers, own = zip(*run, strict=True)
            yield batch.group, layers, own


def why_not_kernel(batches: Sequence[LayerBatch], held: Sequence[Held]) -> str | None:
    """Return why the kernel cannot update these layers; None if it can. The arguments are the same as for
    `KernelStep`.
    """
    layers = [layer for batch in batches for layer in batch.layers]
    names = [str(layer.name) for layer, own in zip(layers, held, strict=True) if not _fits(layer, *own)]
    if not names:
        return None
    return f"these layers are not contiguous float32 tensors on an NVIDIA GPU: {', '.join(names)}"


def _fits(layer: LayerShard, param: Tensor, state: Mapping[str, Tensor]) -> bool:
    tensors = layer.weights, layer.grad, state["exp_avg"], state["exp_avg_sq"]
    is_held = local(param) is param and param.device.type in DEVICES  # a DTensor has no address
    return is_held and all(is_plain(tensor) and tensor.device == param.device for tensor in tensors)


def addresses_of(layer: LayerShard) -> list[int]:
    """Return the addresses of weights, gradient, first and second moment."""
    tensors = layer.weights, layer.grad, layer.state["exp_avg"], layer.state["exp_avg_sq"]
    return [tensor.data_ptr() for tensor in tensors]


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is a contiguous array of float32 numbers."""
    return tensor.dtype == torch.float32 and not tensor.is_sparse and tensor.is_contiguous()


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
