"""Partition of layers into pipeline stages by time, among the contiguous partitions that fit the memory of each rank.

Without a bound, dynamic programming over the ends of stages finds the best partition (`partition.optimal_split`). With
one stage per rank, a bound only forbids some stages, and the search stays as fast. With virtual stages, a rank's bound
applies to all its stages together. The search then also keeps, for each end of a stage, the bytes that ranks with
further stages hold so far, and drops a partition if another one up to this end is better in one respect and no worse
in any: a shortest path under resource constraints (Irnich and Desaulniers 2005,
https://doi.org/10.1007/0-387-25486-2_2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from shardscope.errors import SpecError
from shardscope.spec.partition import optimal_split
from shardscope.spec.units import bytes_text, plural

_BEAM = 50
_MOST_KEPT = 200
"""Largest number of partitions up to the same end of a stage between which a search may be undecided: one that keeps
the emptiest ones only, and one that proves that nothing fits."""
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class MemoryBound:
    """The memory of each rank, and what layers need of it.

    Attributes:
        rank_bytes: Largest number of bytes on each rank.
        stage_ranks: The rank that holds each stage, in stage order.
        in_flight: For each rank, the possible numbers of micro-batches that its stages hold at the same time: one
            number per stage of the rank, in stage order. Combinations that another one exceeds may be left out.
        states: Bytes of each layer's parameters, gradients and optimizer states.
        saved: Bytes that each layer saves for the backward pass of one micro-batch.
    """

    rank_bytes: Sequence[float]
    stage_ranks: Sequence[int]
    in_flight: Sequence[Sequence[Sequence[int]]]
    states: Sequence[float]
    saved: Sequence[float]

    def needed(self, split: Sequence[int]) -> list[float]:
        """Return the bytes that each rank needs under a split, given as the number of layers in each stage."""
        use = [[0.0] * len(moments) for moments in self.in_flight]
        for stage, (start, end) in enumerate(pairwise([0, *accumulate(split)])):
            rank = self.stage_ranks[stage]
            use[rank] = [a + b for a, b in zip(use[rank], self._of_stage(stage, start, end), strict=True)]
        return [max(moments) for moments in use]

    def fits(self, split: Sequence[int]) -> bool:
        """Return whether every rank's bound is met."""
        return all(
            need <= most * _ROUNDING for need, most in zip(self.needed(split), self.rank_bytes, strict=True)
        )

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        return [0.0, *accumulate(self.states)], [0.0, *accumulate(self.saved)]

    @cached_property
    def _counts(self) -> list[list[int]]:
        """The micro-batches that each stage holds at each of its rank's moments."""
        seen = [0] * len(self.rank_bytes)
        found = []
        for rank in self.stage_ranks:
            found.append([moment[seen[rank]] for moment in self.in_flight[rank]])
            seen[rank] += 1
        return found

    @cached_property
    def _is_last(self) -> list[bool]:
        """Whether each stage is its rank's last one."""
        return [rank not in self.stage_ranks[at + 1 :] for at, rank in enumerate(self.stage_ranks)]

    def _of_stage(self, stage: int, start: int, end: int) -> list[float]:
        states, saved = self._sums
        held = states[end] - states[start]
        each = saved[end] - saved[start]
        return [held + count * each for count in self._counts[stage]]

    def add(self, use: _Use, stage: int, start: int, end: int) -> tuple[_Use, float]:
        """Return the use of memory after one more stage, and the bytes that the stage's rank then needs.

        The use has an entry for each rank that has some but not all of its stages.
        """
        rank = self.stage_ranks[stage]
        own = self._of_stage(stage, start, end)
        before = dict(use).get(rank)
        now = tuple(own) if before is None else tuple(a + b for a, b in zip(before, own, strict=True))
        others = tuple(entry for entry in use if entry[0] != rank)
        return (others if self._is_last[stage] else tuple(sorted((*others, (rank, now))))), max(now)

    def times(self, factor: float) -> MemoryBound:
        """Return the bound with `factor` times the memory on every rank."""
        return replace(self, rank_bytes=[most * factor for most in self.rank_bytes])


_Use = tuple[tuple[int, tuple[float, ...]], ...]
"""Bytes of each rank that has further stages, at each of its moments, as (rank, bytes)."""


class _Partial(NamedTuple):
    """A partition of the first layers; `square` is the sum of the squared costs of its stages."""

    square: float
    use: _Use
    ends: tuple[int, ...]


def bounded_split(
    costs: Sequence[float], bound: MemoryBound, *, slowness: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the numbers of layers in the stages with the cheapest most expensive stage that the memory allows.

    No stage is empty. If the partition of `optimal_split` fits, it is returned. With one stage per rank, the partition
    has the smallest sum of squared stage costs among the best ones.

    Args:
        costs: Cost of each layer, in order; at least 0, in any unit.
        bound: The memory of each rank, and what layers need of it.
        slowness: Factor of the cost of all layers in each stage, for stages on devices of different speeds; None for 1.

    Raises:
        SpecError: There are fewer layers than stages, no partition fits, or virtual stages leave too many partitions
            to find the best one that fits; the message has one that fits.

    Example:
        >>> bound = MemoryBound([3, 9], [0, 1], [[(2,)], [(1,)]], states=[1] * 4, saved=[0, 0, 1, 0])
        >>> bounded_split([1, 1, 1, 3], bound), bounded_split([1, 1, 1, 3], bound.times(2))
        ((2, 2), (3, 1))
    """
    free = optimal_split(costs, len(bound.stage_ranks), slowness=slowness)
    if bound.fits(free):
        return free
    return _Search(costs, bound, slowness or [1.0] * len(free)).best(free)


class _Search:
    """Partitions of some layers under a memory bound, stage by stage."""

    def __init__(self, costs: Sequence[float], bound: MemoryBound, slowness: Sequence[float]) -> None:
        self._sums = [0.0, *accumulate(costs)]
        self._bound = bound
        self._slowness = slowness
        self._num_layers, self._num_stages = len(costs), len(slowness)
        self._last_stage = 0
        self._is_cut_short = False

    def slowest(self, split: Sequence[int]) -> float:
        """Return the cost of the most expensive stage."""
        ends = pairwise([0, *accumulate(split)])
        return max(self._cost(stage, start, end) for stage, (start, end) in enumerate(ends))

    def best(self, free: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best partition that fits; `free` is the best one without a bound."""
        found = self.fitting(inf)
        if found is None:
            raise SpecError(self._refusal())
        limits = [limit for limit in self._stage_costs() if limit >= self.slowest(free) / _ROUNDING]
        low, high, is_proven = 0, bisect_left(limits, self.slowest(found) / _ROUNDING), True
        while low < high:
            middle = (low + high) // 2
            better = self.fitting(limits[middle])
            if better is None:
                low, is_proven = middle + 1, is_proven and not self._is_cut_short
            else:
                found, high = better, middle
        if not is_proven:
            slower = self.slowest(found) / self.slowest(free) - 1
            raise SpecError(
                f"memory_bound leaves too many partitions of {self._num_layers} layers into {self._num_stages} stages "
                f"to find the fastest one that fits; use fewer virtual_stages, or give split={found}, which fits and "
                f"whose slowest stage takes {slower:.1%} longer than without a bound"
            )
        return found

    def fitting(self, limit: float) -> tuple[int, ...] | None:
        """Return a partition that fits and whose stages cost at most `limit`; None if none was found."""
        found = self._partitions(limit, most=_BEAM) or (
            self._partitions(limit, most=_MOST_KEPT) if self._is_cut_short else []
        )
        if not found:
            return None
        return tuple(end - start for start, end in pairwise((0, *min(found).ends)))

    def _cost(self, stage: int, start: int, end: int) -> float:
        return (self._sums[end] - self._sums[start]) * self._slowness[stage]

    def _stage_costs(self) -> list[float]:
        """Return all costs that a stage can have, in increasing order."""
        sums = self._sums
        whole = {sums[end] - sums[start] for end in range(len(sums)) for start in range(end)}
        return sorted({cost * slow for cost in whole for slow in set(self._slowness)})

    def _partitions(self, limit: float, *, most: int) -> list[_Partial]:
        """Return partitions that fit and whose stages cost at most `limit`, keeping at most `most` for each end."""
        limit *= _ROUNDING
        self._is_cut_short = False
        begun = {0: [_Partial(0.0, (), ())]}
        for stage in range(self._num_stages):
            longer: dict[int, list[_Partial]] = {}
            for start, kept in begun.items():
                for end in self._ends(stage, start, limit):
                    longer.setdefault(end, []).extend(self._with_stage(kept, stage, start, end))
            begun = {end: self._undominated(found, most) for end, found in longer.items() if found}
            self._last_stage = stage
            if not begun:
                return []
        return begun[self._num_layers]

    def _ends(self, stage: int, start: int, limit: float) -> Iterator[int]:
        """Return where a stage can end so that neither it nor a later one must cost more than `limit`."""
        later = sum(limit / slow for slow in self._slowness[stage + 1 :])
        left = self._num_stages - 1 - stage
        for end in range(start + 1, self._num_layers - left + 1) if left else (self._num_layers,):
            if self._cost(stage, start, end) > limit:
                return
            if self._sums[-1] - self._sums[end] <= later:
                yield end

    def _with_stage(self, kept: Sequence[_Partial], stage: int, start: int, end: int) -> Iterator[_Partial]:
        most = self._bound.rank_bytes[self._bound.stage_ranks[stage]] * _ROUNDING
        square = self._cost(stage, start, end) ** 2
        for each in kept:
            use, needed = self._bound.add(each.use, stage, start, end)
            if needed <= most:
                yield _Partial(each.square + square, use, (*each.ends, end))

    def _undominated(self, found: list[_Partial], most: int) -> list[_Partial]:
        """Return the partitions than which no other leaves every rank as much memory; at most `most`."""
        kept: list[tuple[list[float], _Partial]] = []
        for each in sorted(found, key=self._fullest):
            values = [number for _, numbers in each.use for number in numbers]
            if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other, _ in kept):
                kept.append((values, each))
            if len(kept) > most:
                self._is_cut_short = True
                kept.pop()
                break
        return [each for _, each in kept]

    def _fullest(self, partial: _Partial) -> tuple[float, float]:
        most = self._bound.rank_bytes
        return max((max(use) / most[rank] for rank, use in partial.use), default=0.0), partial.square

    def _refusal(self) -> str:
        """Return why no partition fits: the stage that no partition can place, and how much memory is enough."""
        if self._is_cut_short:
            why = f"among the many into {self._num_stages} stages, none was found"
        else:
            stage = self._last_stage
            rank, is_last = self._bound.stage_ranks[stage], stage == self._num_stages - 1
            why = f"stage {stage} has {bytes_text(self._bound.rank_bytes[rank])} on rank {rank}, and " + (
                "with as many layers as fit in the stages before it, the remaining layers need more"
                if is_last
                else "a single layer needs more, wherever the stages before it end"
            )
        return (
            f"no partition of the {plural(self._num_layers, 'layer')} fits memory_bound: {why}; use "
            f"{self._enough():.3g} times the memory, more ranks, smaller micro-batches, or a schedule with fewer "
            "micro-batches in flight"
        )

    def _enough(self) -> float:
        """Return by which factor memory has to grow on all ranks, rounded up to three digits."""
        low, high = 1.0, 2.0
        while not self._fits_with(high):
            low, high = high, 2 * high
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._fits_with(middle) else (middle, high)
        return float(f"{high * 1.005:.3g}")

    def _fits_with(self, factor: float) -> bool:
        search = _Search([0.0] * self._num_layers, self._bound.times(factor), self._slowness)
        return bool(search._partitions(inf, most=_BEAM))
