"""Signals of a LAMB or LARS step for each layer: references kept in the step, and computed only when read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shardscope.training.optim._kernels import Scalars

Squares = tuple[Scalars, Scalars]
"""Sums of squares of the weights and of the update, per layer."""
Divisor = Callable[[float, float, dict[str, Any]], float]
Bound = Callable[[float, float, dict[str, Any]], str | None]


class LayerSignal(NamedTuple):
    """One layer in one step.

    Attributes:
        layer: Name of the parameter, or its index if the parameters came without names.
        ratio: The trust ratio of the step; None where the layer is not adapted.
        weight_norm: Norm of the weights before the step, of the whole tensor also where it is sharded; None where it
            was not needed.
        update_norm: The ratio's divisor: norm of LAMB's update, or of LARS's gradient with its decay.
        bound: The setting that limited the ratio: ``clamp``, ``trust_clip``, or ``factor`` of 1-bit LAMB; else None.
    """

    layer: str | int
    ratio: float | None
    weight_norm: float | None
    update_norm: float | None
    bound: str | None


@dataclass(frozen=True, slots=True)
class UpdatedLayers:
    """A batch of layers after its update."""

    names: list[str | int]
    group: dict[str, Any]
    squares: Squares | None
    ratios: Scalars | None
    bounds: list[str | None] | None = None
    """The layers' bounds, where they do not follow from the norms alone."""

    def signals(self, divisor: Divisor, bound: Bound) -> Iterator[LayerSignal]:
        """Yield one signal per layer; `divisor` and `bound` are the optimizer's functions."""
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
