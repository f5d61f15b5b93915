"""Partition of a sequence of layers into pipeline stages: the optimal contiguous partition, computed exactly.

The slowest stage limits the speed of a pipeline, and the stage that needs the most memory limits the size of the model.
The best partition therefore minimises the cost of the most expensive stage. Dynamic programming finds it (the linear
partition problem: Skiena, The Algorithm Design Manual, section 10.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from shardscope.errors import SpecError


def optimal_split(
    costs: Sequence[float], num_stages: int, *, slowness: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the numbers of layers in the stages, split so that the most expensive stage costs as little as possible.

    No stage is empty. Among the partitions with this minimum, one with the smallest sum of squared stage costs is
    returned, which also balances the other stages. Time O(stages * layers**2).

    Args:
        costs: Cost of each layer, in order; at least 0, in any unit.
        num_stages: 1 to ``len(costs)``.
        slowness: Factor of the cost of all layers in each stage, for stages on devices of different speeds; None for 1.

    Raises:
        SpecError: There are fewer layers than stages.

    Example:
        >>> optimal_split([1, 1, 1, 1, 4], 2), optimal_split([1] * 6, 2, slowness=[1, 2])
        ((4, 1), (4, 2))
    """
    require_enough_layers(len(costs), num_stages)
    sums, slow = [0.0, *accumulate(costs)], [1.0] * num_stages if slowness is None else slowness
    assert len(slow) == num_stages, f"{len(slow)} factors for {num_stages} stages"
    _, worst = _cut(sums, num_stages, join=max, cost=lambda total, stage: total * slow[stage])

    def square(total: float, stage: int) -> float:
        cost = total * slow[stage]
        return cost * cost if cost <= worst else inf

    ends, _ = _cut(sums, num_stages, join=lambda a, b: a + b, cost=square)
    return tuple(end - start for start, end in pairwise((0, *ends)))


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers in each stage, as equal as possible; the first stages get the remainder.

    Raises:
        SpecError: There are fewer layers than stages.
    """
    require_enough_layers(num_layers, num_stages)
    base, rest = divmod(num_layers, num_stages)
    return tuple(base + (stage < rest) for stage in range(num_stages))


def require_enough_layers(num_layers: int, num_stages: int) -> None:
    """Reject a pipeline with more stages than layers.

    Raises:
        SpecError: There are fewer layers than stages; the message states both numbers.
    """
    if num_layers < num_stages:
        raise SpecError(
            f"the model has {num_layers} layers to split, fewer than the pipeline's {num_stages} stages; "
            f"use at most {num_layers} stages (world_size times virtual_stages), or a deeper model"
        )


def _cut(
    sums: Sequence[float],
    num_stages: int,
    *,
    join: Callable[[float, float], float],
    cost: Callable[[float, int], float],
) -> tuple[list[int], float]:
    """Return the stage ends that minimise the total cost (stage costs combined by `join`), and that cost.

    `cost` takes the summed costs of the layers of a stage, and the index of the stage.
    """
    num_layers = len(sums) - 1
    best = [cost(total, 0) for total in sums]  # best[i]: cost of the first i layers, at first in one stage
    starts: list[list[int]] = []
    for stage in range(1, num_stages):
        row, start_of = [inf] * len(sums), [0] * len(sums)
        for end in range(stage + 1, num_layers + 1):
            row[end], start_of[end] = min(
                (join(best[start], cost(sums[end] - sums[start], stage)), start)
                for start in range(stage, end)
            )
        best = row
        starts.append(start_of)
    ends = [num_layers]
    for start_of in reversed(starts):
        ends.append(start_of[ends[-1]])
    return ends[::-1], best[num_layers]
