"""Replicas of a graph that meet in collectives, and variations of their computations: slow ranks and jitter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardscope.errors import SpecError, quoted
from shardscope.simulator.graph import Flags, Floats, Graph, Ints, Times, run
from shardscope.spec.numbers import LARGEST_QUANTITY

_DRAWS = 1 << 22
"""Maximum number of random numbers that are drawn at once."""


@dataclass(frozen=True)
class Variation:
    """Deviations of computations from their predicted times.

    Attributes:
        stragglers: Factor by which the compute time of each slow rank is multiplied, by rank.
        jitter: Standard deviation of the log-normal factor, with mean 1, by which each compute time is multiplied.
        seed: Seed of the jitter.
    """

    stragglers: Mapping[int, float]
    jitter: float = 0.0
    seed: int = 0

    def check(self, num_ranks: int) -> None:
        """Reject factors that are not positive and ranks that do not exist.

        Raises:
            SpecError: A value is out of range.
        """
        if not 0 <= self.jitter < 10:
            raise SpecError(
                f"jitter={quoted(self.jitter)} is not valid; give a number from 0 to 10, such as 0.05"
            )
        if self.seed < 0:
            raise SpecError(f"seed={quoted(self.seed)} is not valid; give a whole number, 0 or more")
        for rank, factor in self.stragglers.items():
            if not 0 <= rank < num_ranks:
                raise SpecError(f"stragglers has rank {rank}, but ranks are numbered 0 to {num_ranks - 1}")
            if not 0 < factor <= LARGEST_QUANTITY:
                raise SpecError(
                    f"stragglers[{rank}]={quoted(factor)} is not valid; give a positive number, such as 1.5"
                )

    @property
    def is_none(self) -> bool:
        """Whether all ranks compute at the predicted times."""
        return not self.stragglers and not self.jitter


@dataclass(frozen=True)
class Replicated:
    """Copies of one graph, as arrays; operation i of copy r has index r x `graph.num_ops` + i.

    Attributes:
        graph: The graph of one replica.
        copies: Numbers of the replicas that are simulated.
        fixed: Fixed seconds of all operations.
        times: Times of all operations.
    """

    graph: Graph
    copies: tuple[int, ...]
    fixed: Floats
    times: Times


def replicate(
    graph: Graph,
    copies: Sequence[int],
    meetings: Sequence[int],
    lane_ranks: Sequence[Sequence[int]],
    variation: Variation,
) -> Replicated:
    """Run copies of a graph at the same time, with variations of their computations.

    Args:
        graph: Graph of one replica.
        copies: Numbers of the replicas, in the order of `lane_ranks`.
        meetings: Operations after which a replica waits until all others have reached the same operation.
        lane_ranks: Ranks of each lane of each copy: a lane is as slow as the slowest of its ranks.
        variation: Variation of the computations.
    """
    count, several = graph.num_ops, len(copies)
    fixed = np.tile(np.asarray(graph.fixed, float), several)
    computes = np.tile(_computes(graph), several)
    lanes = np.tile(np.asarray(graph.op_lane, np.int64), several)
    lanes += np.repeat(np.arange(several) * len(graph.lanes), count)
    slow = np.array(
        [max((variation.stragglers.get(rank, 1.0) for rank in ranks), default=1.0) for ranks in lane_ranks]
    )
    fixed *= np.where(computes, slow[lanes], 1.0)
    if variation.jitter:
        width = len(lane_ranks[0])
        fixed[computes] *= _factors(int(computes.sum()), width, variation)
    edges = np.asarray(graph.edges, np.int64).reshape(-1, 2)
    size, links = np.asarray(graph.size, float), np.asarray(graph.links, np.int64)
    capacity = np.asarray(graph.capacity, float)
    if several > 1:
        edges = _copied_edges(edges, count, several, np.asarray(meetings, np.int64))
        size, capacity, links = (
            np.tile(size, several),
            np.tile(capacity, several),
            _copied_links(links, graph, several),
        )
        extra = len(meetings)
        size = np.concatenate([size, np.zeros(extra)])
        links = np.concatenate([links, np.full(graph.width * extra, -1)])
        times = run(np.concatenate([fixed, np.zeros(extra)]), size, links, capacity, edges)
    else:
        times = run(fixed, size, links, capacity, edges)
    return Replicated(graph, tuple(copies), fixed, times)


def _computes(graph: Graph) -> Flags:
    """Return whether each operation computes, rather than sends or joins."""
    sends = graph.first_links >= 0
    found: Flags = ~sends & ~np.asarray(graph.is_join, bool)
    return found


def _factors(count: int, width: int, variation: Variation) -> Floats:
    """Return factors of computing times: each the largest of `width` log-normal numbers with mean 1."""
    rng = np.random.default_rng(variation.seed)
    sigma = np.sqrt(np.log1p(variation.jitter**2))
    rows = max(1, _DRAWS // width)
    normal = np.concatenate(
        [rng.standard_normal((min(rows, count - k), width)).max(axis=1) for k in range(0, count, rows)]
        or [np.zeros(0)]
    )
    return np.asarray(np.exp(sigma * normal - sigma**2 / 2))


def _copied_edges(edges: Ints, count: int, copies: int, meetings: Ints) -> Ints:
    """Return the edges of all copies; those that start at a meeting start at one operation per meeting, which all
    copies share.
    """
    common = np.full(count, -1, np.int64)
    common[meetings] = copies * count + np.arange(len(meetings))
    offsets = np.arange(copies, dtype=np.int64)[:, None] * count
    before, after = edges[:, 0][None] + offsets, edges[:, 1][None] + offsets
    shared = np.broadcast_to(common[edges[:, 0]], before.shape)
    before = np.where(shared >= 0, shared, before)
    joined = np.stack([(meetings[None] + offsets).ravel(), np.tile(common[meetings], copies)], axis=1)
    return np.concatenate([np.stack([before.ravel(), after.ravel()], axis=1), joined])


def _copied_links(links: Ints, graph: Graph, copies: int) -> Ints:
    offsets = np.arange(copies, dtype=np.int64)[:, None] * len(graph.capacity)
    return np.asarray(np.where(links[None] >= 0, links[None] + offsets, -1).ravel())
