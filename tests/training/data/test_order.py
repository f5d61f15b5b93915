"""The laws of the two-level order of shards."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardscope.training.data import GlobalSampler
from shardscope.training.data.order import WindowShuffle

orders = st.builds(
    WindowShuffle,
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 15),
    st.integers(0, 2**63),
)


@given(order=orders, epoch=st.integers(0, 5))
def test_an_epoch_visits_every_row_once(order, epoch):
    assert sorted(order.rows(epoch, 0, order.num_rows).tolist()) == list(range(order.num_rows))


@given(order=orders, epoch=st.integers(0, 3), data=st.data())
def test_any_place_can_be_asked_for_at_once(order, epoch, data):
    start = data.draw(st.integers(0, order.num_rows - 1))
    stop = data.draw(st.integers(start + 1, order.num_rows))
    whole = order.rows(epoch, 0, order.num_rows)
    fresh = WindowShuffle(order._lengths.tolist(), order.window, order._seed)
    assert torch.equal(fresh.rows(epoch, start, stop), whole[start:stop])


@given(order=orders, epoch=st.integers(0, 3))
def test_rows_come_from_the_shards_of_their_window_and_windows_from_all_shards(order, epoch):
    window, seen = order.windows(epoch, 0, 1)[0], []
    starts = order._of(epoch).starts
    while window.epoch == epoch:
        rows = order.rows(epoch, int(starts[window.number]), int(starts[window.number + 1]))
        shards = np.searchsorted(order._firsts, rows.numpy(), side="right") - 1
        assert set(shards.tolist()) == set(window.shards)
        assert len(window.shards) <= order.window
        seen += window.shards
        window = order.after(window)
    assert sorted(seen) == list(range(len(order._lengths)))
    assert (window.epoch, window.number) == (epoch + 1, 0)


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = [WindowShuffle([20] * 5, 2, seed).rows(epoch, 0, 100) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert orders[0].tolist() != sorted(orders[0].tolist())


@given(order=orders, sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)), steps=st.integers(0, 12))
def test_a_resume_with_another_batch_goes_on_with_the_next_row(order, sizes, steps):
    first, second = (min(size, order.num_rows) for size in sizes)
    before = GlobalSampler(order.num_rows, first, 0, order=order)
    after = GlobalSampler(order.num_rows, second, 0, order=order)
    assert after.resume(steps, before.state_dict()) == []
    begun = steps - steps % before.steps_per_epoch  # first step of the epoch in which the first run stops
    seen = [row for step in range(begun, steps) for row in before.indices(step).tolist()]
    left = (order.num_rows - len(seen)) // second
    rest = [row for step in range(steps, steps + left) for row in after.indices(step).tolist()]
    assert len({*seen, *rest}) == len(seen) + len(rest)
    assert order.num_rows - len(seen) - len(rest) < second


def test_other_shards_or_another_window_are_told_on_resume():
    before = GlobalSampler(100, 10, 0, order=WindowShuffle([20] * 5, 2, 0))
    for order in (WindowShuffle([20] * 5, 3, 0), WindowShuffle([25] * 4, 2, 0), None):
        notes = GlobalSampler(100, 10, 0, order=order).resume(3, before.state_dict())
        assert len(notes) == 1
        assert "some rows may be read twice" in notes[0]
    assert (
        len(GlobalSampler(100, 10, 0, order=before.order).resume(3, GlobalSampler(100, 10, 0).state_dict()))
        == 1
    )
