"""Trust ratio and norms of each layer in a step of LAMB or LARS.

A step only keeps references to its tensors; the values are computed when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shardscope.training.optim._kernels import Scalars

Squares = tuple[Scalars, Scalars]
"""Sums of squares of the weights, and sums of squares of the update, one number per layer each."""
Divisor = Callable[[float, float, dict[str, Any]], float]
Bound = Callable[[float, float, dict[str, Any]], str | None]


class LayerSignal(NamedTuple):
    """Trust ratio and norms of one layer in one step.

    Attributes:
        layer: Name of the parameter, or its index if the parameters have no names.
        ratio: The trust ratio of the step; None if the layer has none.
        weight_norm: Norm of the weights before the step, over all shards of the tensor; None if it was not computed.
        update_norm: The divisor of the trust ratio: for LAMB, the norm of the update; for LARS, the norm of the
            gradient plus weight decay. None if it was not computed.
        bound: The setting that limited the ratio: ``clamp``, ``trust_clip``, or ``factor`` of 1-bit LAMB; else None.
    """

    layer: str | int
    ratio: float | None
    weight_norm: float | None
    update_norm: float | None
    bound: str | None


@dataclass(frozen=True, slots=True)
class UpdatedLayers:
    """A batch of layers after its update, with the values from which signals are computed."""

    names: list[str | int]
    group: dict[str, Any]
    squares: Squares | None
    ratios: Scalars | None
    bounds: list[str | None] | None = None
    """For each layer, `LayerSignal.bound`; None if it can be computed from the norms."""

    def signals(self, divisor: Divisor, bound: Bound) -> Iterator[LayerSignal]:
        """Yield one `LayerSignal` per layer; `divisor` and `bound` are methods of `LayerwiseOptimizer`."""
        ratios = [None] * len(self.names) if self.ratios is None else _to_list(self.ratios)
        norms = [None] * len(self.names) if self.squares is None else self._norms(self.squares, divisor)
        bounds = self.bounds or [self._bound_of(pair, bound) for pair in norms]
        for name, ratio, pair, held in zip(self.names, ratios, norms, bounds, strict=True):
            weight_norm, update_norm = (None, None) if pair is None else pair
            yield LayerSignal(name, ratio, weight_norm, update_norm, held)

    def _norms(self, squares: Squares, divisor: Divisor) -> list[tuple[float, float]]:
        of_weights, of_updates = ([_root(value) for value in _to_list(column)] for column in squares)
        return [(w, divisor(w, u, self.group)) for w, u in zip(of_weights, of_updates, strict=True)]

    def _bound_of(self, norms: tuple[float, float] | None, bound: Bound) -> str | None:
        return bound(*norms, self.group) if norms is not None and min(norms) > 0 else None


def _to_list(scalars: Scalars) -> list[float]:
    return scalars.tolist() if isinstance(scalars, Tensor) else scalars


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
