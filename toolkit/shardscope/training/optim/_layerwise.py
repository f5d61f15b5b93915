"""Base of LAMB and LARS: a step in two phases around the norms of all layers.

Phase one computes two sums of squares for each layer (a parameter tensor): of its weights, and of the vector whose
norm the trust ratio divides by. Phase two turns them into trust ratios and moves the weights. By default the
layers go through both phases in batches that fit the cache, so that phase two still finds its tensors there. Where
tensors are sharded, `reduce_squares` takes the sums of all layers at once: phase one then runs over all batches
first, and the ratios of the whole model cost one all-reduce.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardscope.errors import SpecError
from shardscope.training.optim._kernels import Number, Scalars
from shardscope.training.optim.signals import LayerSignal, Squares, UpdatedLayers
from shardscope.training.optim.sparse import refuse_sparse
from shardscope.training.sharding import ReduceSquares, local

CACHE_ELEMENTS = 1 << 21
"""Elements per batch on a CPU: the best of 2**16 to 2**25 for 25 M parameters. In smaller batches the calls between
kernels, which run on a cold cache, cost more than the memory traffic they save."""


@dataclass(frozen=True, slots=True)
class LayerShard:
    """One parameter tensor in a step: this rank's shard of it, of its gradient and of its state."""

    name: str | int
    weights: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    is_flat: bool
    """Whether every tensor is flat and contiguous in host memory, so that it can be cut anywhere."""


@dataclass(slots=True)
class LayerBatch:
    """Layers of one group, dtype and device that go through the phases together."""

    group: dict[str, Any]
    layers: list[LayerShard]
    num_elements: int = 0

    def __post_init__(self) -> None:
        self.num_elements = sum(layer.weights.numel() for layer in self.layers)

    @property
    def weights(self) -> list[Tensor]:
        return [layer.weights for layer in self.layers]

    @property
    def grads(self) -> list[Tensor]:
        return [layer.grad for layer in self.layers]

    def column(self, key: str) -> list[Tensor]:
        """One state tensor of every layer."""
        return [layer.state[key] for layer in self.layers]

    def takes(self, layer: LayerShard) -> bool:
        """Add the layer if dtype and device match and the batch still fits the cache; return whether it was added."""
        first, weights = self.layers[0], layer.weights
        num_elements = self.num_elements + weights.numel()
        if (first.weights.dtype, first.weights.device) != (weights.dtype, weights.device):
            return False
        if weights.is_cpu and not (first.is_flat and layer.is_flat and num_elements <= CACHE_ELEMENTS):
            return False
        self.layers.append(layer)
        self.num_elements = num_elements
        return True

    def pieces(self, *columns: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
        """Cut lists with one tensor per layer into corresponding pieces that fit the cache together.

        Only a batch of one large layer is cut; the others fit already.
        """
        if len(self.layers) > 1 or not self.layers[0].is_flat:
            yield columns
        else:
            rows = (column[0].split(CACHE_ELEMENTS) for column in columns)
            yield from (tuple([piece] for piece in pieces) for pieces in zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch between the phases."""

    batch: LayerBatch
    directions: list[Tensor]
    """Direction in which each layer's weights will move, up to a factor."""
    squares: Squares | None
    """None where the group has no ratios."""


class Scratch:
    """Buffers kept from step to step: on a CPU, allocating memory costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._taken = 0

    def rewind(self) -> None:
        """Make all buffers available again."""
        self._taken = 0

    def take(self, batch: LayerBatch) -> list[Tensor]:
        """Return uninitialised tensors like the batch's weights."""
        weights = batch.weights
        if not batch.layers[0].is_flat:
            return [torch.empty_like(tensor) for tensor in weights]
        sizes = [tensor.numel() for tensor in weights]
        return list(self._buffer(sum(sizes), weights[0].dtype)[: sum(sizes)].split(sizes))

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        index, self._taken = self._taken, self._taken + 1
        if index == len(self.buffers):
            self.buffers.append(torch.empty(size, dtype=dtype))
        elif self.buffers[index].numel() < size or self.buffers[index].dtype != dtype:
            self.buffers[index] = torch.empty(size, dtype=dtype)
        return self.buffers[index]


class LayerwiseOptimizer(Optimizer, ABC):
    """Base of optimizers that scale each layer's step by a trust ratio.

    A subclass names its per-parameter tensors (`_new_state`), computes directions and squares (`_stage`),
    turns norms into a ratio (`_divisor`, `_ratio`) and moves the weights (`_apply`). It never waits for a
    device other than the CPU.

    Attributes:
        method: The optimizer's name in error messages.
        is_watched: Whether the norms of the next step will be read, even if the step itself needs none.

    Args:
        params: As for every torch optimizer; with names, `trust_ratios` uses them.
        defaults: Settings of the groups; ``adapt=False`` gives a group's layers no trust ratio.
        reduce_squares: Sums squares over the ranks that hold other shards of the same tensors; called once per
            step. All ranks must hold the same layers in the same order; a layer's shard may be empty.
    """

    method: ClassVar[str]
    is_watched = False

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, reduce_squares: ReduceSquares | None
    ) -> None:
        super().__init__(params, defaults)
        self.reduce_squares = reduce_squares
        self._scratch = Scratch()
        self._last: list[UpdatedLayers] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reduce_squares": self.reduce_squares}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scratch = Scratch()
        self._last = []

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. A `closure` that re-evaluates the model is called first, and its loss is returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._last.clear()
        batches = self._batches()
        self._prepare(batches)
        staged: list[Staged] = []
        for batch in batches:
            staged.append(self._stage(batch))
            if self.reduce_squares is None:
                self._finish(staged)
        self._finish(staged)
        return loss

    @property
    def work_space(self) -> list[Tensor]:
        """Buffers that are kept from step to step and belong to no parameter."""
        return self._scratch.buffers

    def trust_ratios(self) -> dict[str | int, float]:
        """Trust ratios of the last step by parameter name, or by index if the parameters came without names.

        Reading them waits for the device. Layers that were not adapted are left out.
        """
        return {signal.layer: signal.ratio for signal in self.layer_signals() if signal.ratio is not None}

    def layer_signals(self) -> list[LayerSignal]:
        """Signals of the last step for each layer that it moved, in their order. Waits for the device."""
        return [signal for taken in self._last for signal in taken.signals(self._divisor, self._bound)]

    def _finish(self, staged: list[Staged]) -> None:
        """Run phase two of the staged batches and clear them."""
        squares = [item.squares for item in staged if item.squares is not None]
        if squares and self.reduce_squares is not None:
            squares = _reduced(squares, self.reduce_squares)
        parts = iter(squares)
        for item in staged:
            self._move(item, next(parts) if item.squares is not None else None)
        staged.clear()
        self._scratch.rewind()

    def _move(self, staged: Staged, squares: Squares | None) -> None:
        batch = staged.batch
        ratios = None if squares is None else self._ratios(squares, batch.group)
        self._last.append(UpdatedLayers([layer.name for layer in batch.layers], batch.group, squares, ratios))
        self._apply(staged, ratios)

    def _ratios(self, squares: Squares, group: dict[str, Any]) -> Scalars:
        """Trust ratio of each layer: 1 where its weight norm or its divisor is 0."""
        of_weights, of_updates = squares
        if isinstance(of_weights, Tensor) and isinstance(of_updates, Tensor):
            weight_norm = of_weights.sqrt()
            divisor = self._divisor(weight_norm, of_updates.sqrt(), group)
            moving = (weight_norm > 0) & (divisor > 0)
            return torch.where(moving, self._ratio(weight_norm, divisor, group), 1.0)
        ratios = []
        for weight_square, update_square in zip(of_weights, of_updates, strict=True):
            norm = math.sqrt(weight_square)
            bound = self._divisor(norm, math.sqrt(update_square), group)
            ratios.append(self._ratio(norm, bound, group) if norm > 0 and bound > 0 else 1.0)
        return ratios

    def _batches(self) -> list[LayerBatch]:
        """The layers that have a gradient, in the order of the groups."""
        batches: list[LayerBatch] = []
        num_seen = 0
        for group in self.param_groups:
            names = group.get("param_names") or range(num_seen, num_seen + len(group["params"]))
            num_seen += len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                if param.grad is None:
                    continue
                layer = self._layer(name, param, group)
                if not (batches and batches[-1].group is group and batches[-1].takes(layer)):
                    batches.append(LayerBatch(group, [layer]))
        return batches

    def _layer(self, name: str | int, param: Tensor, group: dict[str, Any]) -> LayerShard:
        assert param.grad is not None
        if param.grad.is_sparse:
            raise refuse_sparse(str(name), self.method)
        if param.is_complex():
            raise SpecError(
                f"parameter {name!r} is complex, which {self.method} has no trust ratio for; "
                "use sgd or adamw for it"
            )
        state = self.state[param]
        if not state:
            state.update(self._new_state(param, group))
        tensors = [local(tensor) for tensor in (param, param.grad, *state.values())]
        is_flat = all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)
        weights, grad, *rest = [tensor.view(-1) for tensor in tensors] if is_flat else tensors
        return LayerShard(name, weights, grad, dict(zip(state, rest, strict=True)), is_flat)

    @abstractmethod
    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a parameter's initial optimizer state."""

    def _prepare(self, batches: list[LayerBatch]) -> None:
        """Do the work that needs all layers before phase one."""

    @abstractmethod
    def _stage(self, batch: LayerBatch) -> Staged:
        """Run phase one of a batch: compute its directions and the squares of its layers."""

    def _divisor(
        self,
        weight_norm: Number,  # noqa: ARG002
        update_norm: Number,
        group: dict[str, Any],  # noqa: ARG002
    ) -> Number:
        """Return the divisor of a ratio."""
        return update_norm

    @abstractmethod
    def _ratio(self, weight_norm: Number, divisor: Number, group: dict[str, Any]) -> Number:
        """Return the ratio of one layer whose norm and divisor are above 0, or of many layers as tensors."""

    @abstractmethod
    def _bound(self, weight_norm: float, divisor: float, group: dict[str, Any]) -> str | None:
        """Return the setting that limits the layer's ratio; None where the ratio follows the plain formula."""

    @abstractmethod
    def _apply(self, staged: Staged, ratios: Scalars | None) -> None:
        """Move the weights along the directions, scaled by the ratios if there are any."""


def total_squares(squares: list[Tensor], num_layers: int) -> Squares | None:
    """Sum squares over pieces; the input holds, piece by piece, first the weights' and then the updates' squares."""
    if not squares:
        return None
    if squares[0].is_cpu:
        values = [square.item() for square in squares]
        sums = [sum(values[index :: 2 * num_layers]) for index in range(2 * num_layers)]
        return sums[:num_layers], sums[num_layers:]
    of_weights, of_updates = torch.stack(squares).double().view(-1, 2, num_layers).sum(dim=0)
    return of_weights, of_updates


def _reduced(squares: list[Squares], reduce_squares: ReduceSquares) -> list[Squares]:
    """Sum the squares of all batches over the ranks in one call."""
    tensors = [torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in rows]) for rows in squares]
    joined = torch.cat(tensors, dim=1)
    sums = reduce_squares(joined.flatten()).view_as(joined).split([rows.shape[1] for rows in tensors], dim=1)
    return [(rows[0], rows[1]) if not rows.is_cpu else (rows[0].tolist(), rows[1].tolist()) for rows in sums]
