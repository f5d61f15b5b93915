"""Sums of squares of layers of which a tensor group's ranks hold parts, and of layers that each rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.training.sharding import ReduceSquares
from shardscope.training.tensor.axis import TensorAxis


@dataclass(frozen=True)
class LayerSquares:
    """Sums squares by layer over the data axis and the tensor axis; a whole layer counts on one tensor rank only.

    Attributes:
        axis: The ranks of the tensor group.
        divided: Names of the divided parameters.
        inner: Function that sums squares over the data axis; None if its ranks have the same ones.
    """

    axis: TensorAxis
    divided: frozenset[str]
    inner: ReduceSquares | None = None

    def __call__(self, squares: Tensor) -> Tensor:  # noqa: ARG002 - of `ReduceSquares`
        """Refuse squares without names, as they do not say which layers are divided."""
        raise SpecError(
            "this optimizer sums the norms of layers itself, which is not available with tensor parallelism; use one "
            "of shardscope's optimizers"
        )

    def of_layers(self, squares: Tensor, names: Sequence[str | int]) -> Tensor:
        """Return the sums of squares over all parts.

        Args:
            squares: A float64 vector with one or several rows of one number per layer.
            names: Names of the layers.
        """
        if self.axis.rank:
            counts = torch.tensor([name in self.divided for name in names], device=squares.device)
            squares = (squares.view(-1, len(names)) * counts).flatten()
        if isinstance(self.inner, LayerSquares):  # of an axis that divides other tensors
            squares = self.inner.of_layers(squares, names)
        elif self.inner is not None:
            squares = self.inner(squares)
        return self.axis.total(squares)
