"""Base class of LAMB and LARS, whose step has two phases: compute norms, then scale and apply the updates.

A layer is one parameter tensor. Phase one computes two sums of squares for each layer: one over its weights,
and one over the vector whose norm is the divisor of the trust ratio. Phase two computes the trust ratios and
updates the weights.

By default, the layers are processed in batches that fit the cache: each batch goes through both phases, so that phase
two finds its tensors in the cache. If tensors are sharded, phase one first runs for all batches. Then one call of
`reduce_squares`, an all-reduce, sums the squares of all layers, and phase two runs for all batches.
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
from shardscope.training.optim.sparse import sparse_gradient_error
from shardscope.training.sharding import ReduceSquares, local

CACHE_ELEMENTS = 1 << 21
"""Maximum number of elements per batch on a CPU: the fastest of 2**16 to 2**25 for a model of 25 M parameters. Smaller
batches cause less memory traffic, but more calls, which cost more time than the traffic saves."""


@dataclass(frozen=True, slots=True)
class LayerShard:
    """One parameter tensor in a step: this rank's shards of the weights, the gradient and the optimizer state."""

    name: str | int
    weights: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    is_flat: bool
    """Whether all tensors are one-dimensional and contiguous in host memory, so that they can be split anywhere."""


@dataclass(frozen=True, slots=True)
class FlatViews:
    """Flat views of a parameter and its state, kept from step to step because creating them takes longer than a small
    layer's arithmetic. They keep their memory alive, so an equal address means the same memory.
    """

    places: list[int]
    weights: Tensor
    state: dict[str, Tensor]

    @staticmethod
    def places_of(param: Tensor, state: dict[str, Tensor]) -> list[int]:
        """Return the number of elements, and the address of each tensor."""
        return [param.numel(), param.data_ptr(), *[tensor.data_ptr() for tensor in state.values()]]

    def fit(self, param: Tensor, state: dict[str, Tensor]) -> bool:
        """Return whether the views still refer to these tensors."""
        return param.is_contiguous() and self.places == self.places_of(param, state)


@dataclass(slots=True)
class LayerBatch:
    """Layers with the same parameter group, dtype and device that are processed together."""

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
        """Return the state tensor `key` of every layer."""
        return [layer.state[key] for layer in self.layers]

    def try_add(self, layer: LayerShard) -> bool:
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
        """Split lists with one tensor per layer into corresponding pieces that fit the cache together.

        Only a batch with a single layer is split, because that layer may be too large; other batches fit the cache.
        """
        if len(self.layers) > 1 or not self.layers[0].is_flat:
            yield columns
        else:
            rows = (column[0].split(CACHE_ELEMENTS) for column in columns)
            yield from (tuple([piece] for piece in pieces) for pieces in zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class Staged:
    """Results of phase one for a batch."""

    batch: LayerBatch
    directions: list[Tensor]
    """Update direction of each layer, to be scaled by the learning rate and the trust ratio."""
    squares: Squares | None
    """Sums of squares for the trust ratios; None if the parameter group does not use trust ratios."""


class Scratch:
    """Temporary buffers, kept from step to step because on a CPU allocating them takes longer than the arithmetic."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._taken = 0

    def rewind(self) -> None:
        """Make all buffers available for reuse."""
        self._taken = 0

    def take(self, batch: LayerBatch) -> list[Tensor]:
        """Return uninitialised tensors with the shapes and dtype of the batch's weights."""
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
    """Base class of optimizers that scale each layer's update by a trust ratio.

    A subclass creates the optimizer state of a parameter (`_new_state`), computes update directions and sums of squares
    (`_stage`), computes the trust ratio from norms (`_divisor`, `_ratio`), and updates the weights (`_apply`). A step
    never waits for a device other than the CPU.

    Attributes:
        method: The optimizer's name in error messages.
        is_watched: Whether to compute the norms of the next step even if the update does not need them, because they
            will be read afterwards.

    Args:
        params: As for every PyTorch optimizer; if parameters have names, `trust_ratios` uses them.
        defaults: Default settings of the parameter groups; ``adapt=False`` turns off trust ratios for a group.
        reduce_squares: Function that sums squares over the ranks that have the other shards of the same tensors; called
            once per step. All ranks must have the same layers in the same order; a layer's shard may be empty.
    """

    method: ClassVar[str]
    is_watched = False

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, reduce_squares: ReduceSquares | None
    ) -> None:
        super().__init__(params, defaults)
        self.reduce_squares = reduce_squares
        self._scratch = Scratch()
        self._views: dict[int, FlatViews] = {}
        self._last: list[UpdatedLayers] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reduce_squares": self.reduce_squares}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scratch = Scratch()
        self._views = {}
        self._last = []

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimizer step; a `closure` that re-evaluates the model is called first, and its loss returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._last.clear()
        if not self._repeat():
            self._update(self._batches())
        return loss

    def _repeat(self) -> bool:
        """Take the step exactly like the previous one if that is known to be valid; return whether it was taken."""
        return False

    def _update(self, batches: list[LayerBatch]) -> None:
        """Run both phases for all batches."""
        self._prepare(batches)
        staged: list[Staged] = []
        for batch in batches:
            staged.append(self._stage(batch))
            if self.reduce_squares is None:
                self._finish(staged)
        self._finish(staged)

    @property
    def work_space(self) -> list[Tensor]:
        """Temporary buffers that are kept from step to step."""
        return self._scratch.buffers

    def trust_ratios(self) -> dict[str | int, float]:
        """Return the trust ratios of the last step by parameter name, or by index if the parameters have no names.

        Waits for the device. Layers without a trust ratio are left out.
        """
        return {signal.layer: signal.ratio for signal in self.layer_signals() if signal.ratio is not None}

    def layer_signals(self) -> list[LayerSignal]:
        """Return a `LayerSignal` for each layer updated in the last step, in order; waits for the device."""
        return [signal for taken in self._last for signal in taken.signals(self._divisor, self._bound)]

    def _finish(self, staged: list[Staged]) -> None:
        """Run phase two for the batches in `staged`, then clear the list."""
        squares = [item.squares for item in staged if item.squares is not None]
        if squares and self.reduce_squares is not None:
            squares = reduced(squares, self.reduce_squares)
        parts = iter(squares)
        pairs = [(item, next(parts) if item.squares is not None else None) for item in staged]
        begun = len(self._last)
        for item, each in reversed(pairs):  # the tensors of the last ones may still be in the cache
            self._move(item, each)
        self._last[begun:] = reversed(self._last[begun:])
        staged.clear()
        self._scratch.rewind()

    def _move(self, staged: Staged, squares: Squares | None) -> None:
        batch = staged.batch
        ratios = None if squares is None else self._ratios(squares, batch.group)
        self._last.append(UpdatedLayers([layer.name for layer in batch.layers], batch.group, squares, ratios))
        self._apply(staged, ratios)

    def _ratios(self, squares: Squares, group: dict[str, Any]) -> Scalars:
        """Return the trust ratio of each layer; it is 1 if the weight norm or the divisor is 0."""
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
        """Return batches of the layers that have a gradient, in the order of the parameter groups."""
        batches: list[LayerBatch] = []
        num_seen = 0
        for group in self.param_groups:
            names = group.get("param_names") or range(num_seen, num_seen + len(group["params"]))
            num_seen += len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                if param.grad is None:
                    continue
                layer = self._layer(name, param, group)
                if not (batches and batches[-1].group is group and batches[-1].try_add(layer)):
                    batches.append(LayerBatch(group, [layer]))
        return batches

    def _layer(self, name: str | int, param: Tensor, group: dict[str, Any]) -> LayerShard:
        assert param.grad is not None
        if param.grad.is_sparse:
            raise sparse_gradient_error(str(name), self.method)
        if param.is_complex():
            raise SpecError(
                f"parameter {name!r} is complex, but {self.method} supports only real parameters; "
                "use optimizer='sgd' or 'adamw'"
            )
        state = self.state[param]
        if not state:
            state.update(self._new_state(param, group))
        grad = local(param.grad)
        views = self._views.get(id(param))
        if views is None or not views.fit(param, state):
            views = self._keep_views(param, state)
        if views is None or not (grad.is_cpu and grad.is_contiguous()):
            rest = {key: local(tensor) for key, tensor in state.items()}
            return LayerShard(name, local(param), grad, rest, is_flat=False)
        return LayerShard(name, views.weights, grad.view(-1), views.state, is_flat=True)

    def _keep_views(self, param: Tensor, state: dict[str, Tensor]) -> FlatViews | None:
        """Create flat views, and keep them for the next step; None if a tensor has no flat view on the host."""
        weights, *rest = [local(tensor) for tensor in (param, *state.values())]
        if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (weights, *rest)):
            self._views.pop(id(param), None)
            return None
        flat = dict(zip(state, [tensor.view(-1) for tensor in rest], strict=True))
        views = FlatViews(FlatViews.places_of(weights, flat), weights.view(-1), flat)
        if weights is param:  # a DTensor itself has no address
            self._views[id(param)] = views
        return views

    @abstractmethod
    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a parameter's initial optimizer state."""

    def _prepare(self, batches: list[LayerBatch]) -> None:
        """Do work that needs all layers, before phase one."""

    @abstractmethod
    def _stage(self, batch: LayerBatch) -> Staged:
        """Run phase one for a batch: compute the update directions and the sums of squares."""

    def _divisor(
        self,
        weight_norm: Number,  # noqa: ARG002
        update_norm: Number,
        group: dict[str, Any],  # noqa: ARG002
    ) -> Number:
        """Return the divisor of the trust ratio, by default the norm of the update."""
        return update_norm

    @abstractmethod
    def _ratio(self, weight_norm: Number, divisor: Number, group: dict[str, Any]) -> Number:
        """Return the trust ratio for one layer whose weight norm and divisor are above 0, or for many as a vector."""

    @abstractmethod
    def _bound(self, weight_norm: float, divisor: float, group: dict[str, Any]) -> str | None:
        """Return the name of the setting that limits the layer's trust ratio; None if no setting does."""

    @abstractmethod
    def _apply(self, staged: Staged, ratios: Scalars | None) -> None:
        """Update the weights along the staged directions, scaled by the trust ratios if there are any."""


def total_squares(squares: list[Tensor], num_layers: int) -> Squares | None:
    """Sum squares over the pieces of layers.

    Args:
        squares: For each piece in turn: the squares of the weights of all layers, then the squares of their updates.
        num_layers: Number of layers.

    Returns:
        The sums for weights and for updates, one number per layer; None if `squares` is empty.
    """
    if not squares:
        return None
    if squares[0].is_cpu:
        values = [square.item() for square in squares]
        sums = [sum(values[index :: 2 * num_layers]) for index in range(2 * num_layers)]
        return sums[:num_layers], sums[num_layers:]
    of_weights, of_updates = torch.stack(squares).double().view(-1, 2, num_layers).sum(dim=0)
    return of_weights, of_updates


def reduced(squares: list[Squares], reduce_squares: ReduceSquares) -> list[Squares]:
    """Sum the squares of all batches over the ranks in one call of `reduce_squares`."""
    tensors = [torch.stack([torch.as_tensor(row, dtype=torch.float64) for row in rows]) for rows in squares]
    joined = torch.cat(tensors, dim=1)
    sums = reduce_squares(joined.flatten()).view_as(joined).split([rows.shape[1] for rows in tensors], dim=1)
    return [(rows[0], rows[1]) if not rows.is_cpu else (rows[0].tolist(), rows[1].tolist()) for rows in sums]
