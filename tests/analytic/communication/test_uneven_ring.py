"""The time of a ring with uneven chunks, by formula and message by message."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic.communication.ring import longest_chain

WHOLE = 12
"""Chunks of a multiple of this size are cut into equal slices."""


def step_by_step(sizes: list[int], slices: int) -> float:
    """The end of the last message, if each starts when its link is free and its slice has arrived."""
    ranks = np.arange(len(sizes))
    ends: list[np.ndarray] = []
    for message in range((len(sizes) - 1) * slices):
        hop = message // slices
        size = np.array(sizes)[(ranks - 1 - hop) % len(sizes)] / slices
        free = ends[-1] if ends else np.zeros(len(sizes))
        arrived = np.roll(ends[message - slices], 1) if hop else free
        ends.append(np.maximum(free, arrived) + size)
    return float(ends[-1].max())


@given(
    st.lists(st.integers(0, 50).map(lambda size: size * WHOLE), min_size=2, max_size=6),
    st.sampled_from([1, 2, 3, 4, 6]),
)
def test_the_longest_chain_is_what_the_messages_take(sizes: list[int], slices: int) -> None:
    assert longest_chain(np.array(sizes), slices) == step_by_step(sizes, slices)


@given(st.integers(2, 8), st.integers(1, 1000), st.integers(1, 9))
def test_equal_chunks_take_what_a_rank_sends(ranks: int, size: int, slices: int) -> None:
    assert longest_chain(np.full(ranks, size * slices), slices) == (ranks - 1) * size * slices
