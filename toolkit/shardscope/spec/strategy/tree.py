"""Data parallel over our own binary tree."""

from __future__ import annotations

from typing import ClassVar, Literal

from shardscope.spec.compression import Carriage
from shardscope.spec.numbers import MessageMiB
from shardscope.spec.strategy.all_reduce import Bucketed


class Tree(Bucketed):
    """Our own binary tree: sums climb to rank 0 and the total comes back down, slice after slice.

    It takes 2 log2(W) steps where a ring takes 2(W-1), but a rank with two children sends three times its gradients,
    where a ring sends less than two.
    """

    kind: Literal["tree"] = "tree"
    carries: ClassVar[frozenset[Carriage]] = frozenset({"sums"})
    slice_mb: MessageMiB = 2.0
    """Longest message in MiB: a longer bucket is cut into slices, which climb and come down at the same time."""
