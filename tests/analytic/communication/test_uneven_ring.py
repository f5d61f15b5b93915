"""The time of a ring with uneven chunks, message by message and by laws for one call."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic.communication.ring import ring_busy_elements

WHOLE = 12
"""Chunks of a multiple of this size are cut into equal slices."""
SLICES = st.sampled_from([1, 2, 3, 4, 6])


def longest_chain(sizes: np.ndarray, slices: int) -> int:
    """The longest chain of messages that wait for each other in one call.

    It consists of m whole chunks that follow one another in the ring, and of one slice of the largest of them on each
    of the W-1-m other hops, for some m from 1, the largest chunk on its way around, to W-1, all that a rank sends.
    """
    hops = len(sizes) - 1
    windows = [[np.roll(sizes, -first)[:m] for first in range(len(sizes))] for m in range(1, hops + 1)]
    return max(
        int(part.sum() + (hops - len(part)) * part.max() // slices) for parts in windows for part in parts
    )


@given(st.lists(st.integers(0, 50).map(lambda size: size * WHOLE), min_size=2, max_size=6), SLICES)
def test_one_call_takes_as_long_as_its_longest_chain(sizes: list[int], slices: int) -> None:
    chunks = np.array(sizes)
    assert ring_busy_elements([(chunks, slices)]) == longest_chain(chunks, slices)


@given(st.integers(2, 8), st.integers(1, 1000), st.integers(1, 9), st.integers(1, 4))
def test_equal_chunks_take_what_a_rank_sends(ranks: int, size: int, slices: int, calls: int) -> None:
    chunks = np.full(ranks, size * slices)
    assert ring_busy_elements([(chunks, slices)] * calls) == calls * (ranks - 1) * size * slices


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), SLICES, st.integers(1, 5))
def test_calls_that_follow_one_another_overlap_at_most(sizes: list[int], slices: int, calls: int) -> None:
    chunks = np.array(sizes)
    one, several = (ring_busy_elements([(chunks, slices)] * count) for count in (1, calls))
    assert max(one, calls * int(chunks.sum() - chunks.min())) <= several <= calls * one
