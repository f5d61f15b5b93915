"""Uneven division of a batch: by shares, and by speeds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.spec.shares import samples_by_share, samples_by_speed


def job(batch: ss.Batch, strategy: str | ss.Strategy = "ring", **changes: object) -> ss.Job:
    return ss.Job(model="mlp", data="digits", strategy=strategy, batch=batch, world_size=4, **changes)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 50))
def test_shares_are_exact_and_add_up(shares: list[int], times: int) -> None:
    batch = sum(shares) * times
    samples = samples_by_share(batch, shares, len(shares))
    assert sum(samples) == batch
    assert all(count * sum(shares) == batch * share for count, share in zip(samples, shares, strict=True))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.integers(3, 9))
def test_no_other_division_by_speed_ends_sooner(speeds: list[float], units: int) -> None:
    found = samples_by_speed(units, speeds)
    assert sum(found) == units
    assert min(found) >= 1

    def slowest(counts: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    others = (each for each in product(range(1, units + 1), repeat=len(speeds)) if sum(each) == units)
    assert slowest(found) <= min(map(slowest, others)) * (1 + 1e-12)


def test_a_division_by_speed_keeps_micro_batches_whole() -> None:
    assert samples_by_speed(48, [2.0, 2.0, 1.0, 1.0], unit=8) == (16, 16, 8, 8)


def test_a_batch_with_shares_says_the_samples_of_each_rank() -> None:
    batch = ss.Batch(96, micro_batch=8, shares=(2, 2, 1, 1))
    assert batch.samples(4) == (32, 32, 16, 16)
    assert batch.per_rank(4) == 32
    assert batch.accumulation_steps(4) == 4
    assert ss.Batch.from_json(batch.to_json()) == batch
    assert job(batch).num_micro_batches == 4


def test_shares_may_be_text_as_on_a_command_line() -> None:
    for text in ("2,2,1,1", "(2, 2, 1, 1)", "[2, 2, 1, 1]"):
        assert ss.Batch(96, shares=text).shares == (2, 2, 1, 1)
    assert ss.Batch(96, shares="measured").samples(4) == (24, 24, 24, 24)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shares": (2, 2, 1)}, "has 3 numbers, but the batch is divided among 4 ranks; give 4"),
        ({"shares": (4, 4, 3, 2)}, "batch.global_batch=64 cannot be divided .* a multiple of 13, such as 52 or 65"),
        ({"shares": (1, 0, 1, 1)}, "is not valid; give one whole number of at least 1 for each rank"),
        ({"shares": "fast"}, "or 'measured'"),
        ({"shares": (2, 2, 3, 1), "micro_batch": 3}, "does not divide the per-rank batches .16, 16, 24, 8."),
        ({"rebalance_every": 10}, "batch.rebalance_every=10 has no effect without shares='measured'"),
    ],
)  # fmt: skip
def test_wrong_shares_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(ss.Batch(64, **fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "gossip"}, "ranks average parameters, not gradients"),
        ({"strategy": "parameter-server:async"}, "does not use the gradients of all workers"),
        ({"strategy": ss.ParameterServer(backups=1)}, "does not use the gradients of all workers"),
        ({"compression": "local-sgd"}, "each rank trains its own parameters for several steps"),
        ({"record": ss.Record(noise_scale=True)}, "compares gradients of equal numbers of samples"),
    ],
)
@pytest.mark.parametrize("shares", [(2, 2, 1, 1), "measured"])
def test_what_cannot_be_weighted_is_refused(changes: dict[str, object], message: str, shares: object) -> None:
    with pytest.raises(SpecError, match=message):
        job(ss.Batch(96, shares=shares), **changes)


def test_ranks_that_exchange_in_each_pass_make_one_pass_each() -> None:
    with pytest.raises(
        SpecError,
        match="whose ranks communicate in each pass, so all need equally many passes; leave micro_batch",
    ):
        job(ss.Batch(96, micro_batch=8, shares=(2, 2, 1, 1)), "zero-3")
    assert job(ss.Batch(96, shares=(2, 2, 1, 1)), "zero-3").num_micro_batches == 1


def test_no_layout_has_unequal_shares() -> None:
    with pytest.raises(SpecError, match="has no corresponding layout"):
        job(ss.Batch(96, shares=(2, 2, 1, 1))).layout()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "async", "backups": 1}, "backups=1 has no effect with mode='async'"),
        ({"backups": 4}, "strategy.backups=4 leaves no worker of 4 whose gradient is used; use at most 3"),
    ],
)
def test_backups_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job(ss.Batch(64), ss.ParameterServer(**settings))
