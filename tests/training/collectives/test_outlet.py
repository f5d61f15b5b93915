"""What leaves a link when, and comes through the receiver's, against a fluid worked out drop by drop."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardscope.training.collectives.outlet import Outlet
from shardscope.training.collectives.switch import Switch

Sends = list[tuple[float, int, int]]


def leave(sends: Sends, bandwidth: float) -> dict[int, tuple[float, float]]:
    """First and last byte of each message, by its number."""
    outlet: Outlet[int] = Outlet(bandwidth)
    left = []
    for number, (when, receiver, num_bytes) in enumerate(sends):
        left += outlet.advance(when)
        outlet.add(number, receiver, num_bytes, when)
    left += outlet.advance(1e9)
    return {done.item: (done.first, done.last) for done in left}


def drops(sends: Sends, bandwidth: float, step: float) -> dict[int, float]:
    """Last byte of each message: in every short step, the first message to each receiver gets an even share."""
    rest = {number: float(num_bytes) for number, (_, _, num_bytes) in enumerate(sends)}
    now, ends = 0.0, {}
    while rest:
        first: dict[int, int] = {}
        for number in rest:
            if sends[number][0] <= now:
                first.setdefault(sends[number][1], number)
        now += step
        for number in first.values():
            rest[number] -= step * bandwidth / len(first)
            if rest[number] <= 0:
                del rest[number]
                ends[number] = now
    return ends


def test_one_message_takes_its_bytes_over_the_bandwidth_and_the_next_waits() -> None:
    assert leave([(1.0, 1, 50), (1.0, 1, 50), (9.0, 1, 10)], 10.0) == {0: (1, 6), 1: (6, 11), 2: (11, 12)}


def test_two_receivers_share_the_link_and_the_longer_message_then_has_it_alone() -> None:
    assert leave([(0.0, 1, 10), (0.0, 2, 30)], 10.0) == {0: (0, 2), 1: (0, 4)}


@given(
    st.lists(
        st.tuples(st.integers(0, 5).map(float), st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=6
    ).map(sorted)
)
def test_it_is_a_fluid(sends: Sends) -> None:
    exact, step = leave(sends, 10.0), 1e-3
    assert {n: end for n, (_, end) in exact.items()} == pytest.approx(
        drops(sends, 10.0, step), abs=step * 4 * len(sends)
    )
    assert all(end - first >= num_bytes / 10.0 - 1e-9 for (first, end), (_, _, num_bytes) in zip(
        (exact[n] for n in range(len(sends))), sends, strict=True
    ))  # fmt: skip


def test_taking_all_out_leaves_nothing() -> None:
    outlet: Outlet[str] = Outlet(1.0)
    for name, receiver in (("a", 1), ("b", 2), ("c", 1)):
        outlet.add(name, receiver, 5, 0.0)
    assert outlet.all_end() == 15.0
    assert sorted(outlet.clear()) == ["a", "b", "c"]
    assert outlet.next_end() is None
    assert outlet.advance(100.0) == []


@pytest.fixture
def switch() -> Switch:
    return Switch(dist.HashStore(), 0, 1)


def test_several_that_come_at_once_come_through_one_after_the_other(switch: Switch) -> None:
    assert [switch.receive(0, 10.0, 12.0, 2.0) for _ in range(3)] == [12.0, 14.0, 16.0]


def test_several_that_share_their_senders_links_come_through_together(switch: Switch) -> None:
    """Two senders at half their rates fill the receiver's link exactly."""
    assert [switch.receive(0, 10.0, 14.0, 2.0) for _ in range(2)] == [14.0, 14.0]


def test_a_short_one_delays_a_long_one_by_its_own_length_only(switch: Switch) -> None:
    assert switch.receive(0, 9.0, 9.1, 0.1) == pytest.approx(9.1)
    assert switch.receive(0, 0.0, 10.0, 10.0) == pytest.approx(10.1)


def test_what_came_through_long_ago_delays_nobody(switch: Switch) -> None:
    assert switch.receive(0, 0.0, 5.0, 5.0) == 5.0
    assert switch.receive(0, 7.0, 8.0, 1.0) == 8.0
