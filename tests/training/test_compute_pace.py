"""Emulated computation: for how long a rank sleeps, with the clock and the sleep replaced."""

from __future__ import annotations

import math
import time

import pytest
import torch

import shardscope as ss
from shardscope.spec.cluster.emulated import EmulatedNode
from shardscope.training import compute_pace
from shardscope.training.compute_pace import ComputePace, PassSpan

FLOPS = 2 * 4 * 8 * 16
"""Of the matrix product in `product`."""


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps, on clocks that stand still except in them and in `computing`."""
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        now[0] += seconds

    def compute(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(compute_pace, "computing", compute, raising=False)
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    monkeypatch.setattr(compute_pace.clock, "now", lambda: now[0])
    return slept


def computing(seconds: float) -> None:
    compute_pace.computing(seconds)  # type: ignore[attr-defined]


def pace(**node: float) -> ComputePace:
    job = ss.Job(model="mlp", data="digits", optimizer=ss.Optimizer("sgd", lr=0.1, momentum=0.0))
    return ComputePace(job, EmulatedNode(upload=1e6, download=1e6, **node))


def product() -> None:
    torch.ones(4, 8) @ torch.ones(8, 16)


def test_a_pass_takes_its_flops_at_the_stated_rate(slept: list[float]) -> None:
    found = pace(flops=FLOPS, slowdown=2.0)
    for _ in range(2):
        with found.forward(0):
            product()
            computing(0.5)
    with found.forward(0):
        computing(3.0)
    assert slept == [2.0, 1.5, 0.0]
    assert found.take_late() == 1.0
    assert found.take_late() == 0.0


def test_passes_of_stages_queue_up_on_the_processor(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.queued(3, 1, PassSpan(0.0)):
        product()
    found.begin_queue()
    passes = []
    for stage_passes, before, arrives in ((2, 0.0, 0.0), (1, 0.25, 0.0), (1, 1.0, 4.5), (1, 0.0, 0.0)):
        computing(before)  # by the process itself, between passes
        found.arrived_at = arrives
        passes.append(PassSpan(0.0))
        with found.queued(3, stage_passes, passes[-1]):
            computing(0.25)
    assert [(each.start, each.end) for each in passes] == [(1, 3), (3, 4), (4.5, 5.5), (5.5, 6.5)]
    assert slept == [1.0, 1.75, 0.5, 0.25, 0.75]
    assert found.take_late() == 0.0


def test_a_pass_of_a_stage_takes_longer_by_its_waits_for_other_ranks(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.queued(0, 1, PassSpan(0.0)):
        product()
    found.begin_queue()
    passes = [PassSpan(0.0), PassSpan(0.0)]
    for times in passes:
        with found.queued(0, 1, times):
            computing(0.25)
            with found.waiting(is_within_layer=True):
                computing(0.5)
    assert [(each.start, each.end) for each in passes] == [(1, 2.5), (2.5, 4)]
    assert slept == [1.0, 0.75, 0.75]
    assert found.take_late() == 0.0


def test_gradients_leave_when_the_emulated_pass_is_over(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
    with found.exchanging_backward(lambda: 1.5):  # half a second after its start
        computing(0.5)
        found.hold_gradients()
        computing(10.0)  # the exchange
    assert slept == [1.0, 1.5]
    assert found.backward_end == 3.0, "before the exchange"
    found.hold_gradients()  # after the pass, as of the norm
    assert slept == [1.0, 1.5]
    assert found.take_late() == 0.0


@pytest.mark.parametrize(("is_within_layer", "end"), [(True, 3.75), (False, 3.0)])
def test_a_wait_within_a_layer_delays_the_gradients(
    slept: list[float], *, is_within_layer: bool, end: float
) -> None:
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
    with found.exchanging_backward(lambda: math.inf):
        with found.waiting(is_within_layer=is_within_layer):
            computing(0.75)
        computing(0.25)
        found.hold_gradients()
        assert compute_pace.clock.now() == end
    assert found.backward_end == end
    assert found.take_late() == 0.0


def test_a_wait_while_gradients_are_held_delays_them_too(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
    sleep, waits = time.sleep, [0.5]

    def sleep_and_wait(seconds: float) -> None:
        sleep(seconds)
        if waits:  # on the thread of the pass
            with found.waiting(is_within_layer=True):
                sleep(waits.pop())

    with found.exchanging_backward(lambda: math.inf):
        monkeypatch.setattr(time, "sleep", sleep_and_wait)
        found.hold_gradients()
    assert found.backward_end == 3.5


def test_a_pass_without_exchange_sleeps_at_the_end_and_a_slower_one_is_late(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
    for seconds in (0.5, 2.25):
        with found.exchanging_backward(lambda: math.inf):
            computing(seconds)
    assert slept == [1.0, 1.5, 0.0]
    assert found.backward_end == 5.25
    assert found.take_late() == 0.25


def test_without_a_stated_rate_a_pass_sleeps_before_its_exchange_for_as_long_as_the_last_one_took(
    slept: list[float],
) -> None:
    found = pace(slowdown=3.0)
    for _ in range(2):
        with found.exchanging_backward(lambda: math.inf):
            computing(0.5)
            found.hold_gradients()
    assert slept == [0.0, 1.0]
    assert found.backward_end is None


def test_waiting_for_other_ranks_is_not_computing(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
    with found.forward(0):
        computing(0.25)
        with found.waiting():
            computing(10.0)
    assert slept == [1.0, 0.75]


def test_an_update_takes_its_bytes_at_the_stated_rate(slept: list[float]) -> None:
    with pace(flops=1.0, memory_bandwidth=12.0).update(5):  # three float32 numbers per parameter
        computing(1.0)
    with pace(flops=1.0).update(5):
        computing(1.0)
    with pace(slowdown=3.0).update(5):
        computing(1.0)
    assert slept == [4.0, 2.0]


def test_a_part_with_other_flops_in_each_pass_sleeps_before_other_ranks_get_its_results(
    slept: list[float],
) -> None:
    """A pass as a whole takes its usual FLOPs and those of its part, and its backward pass twice as many."""
    found = pace(flops=FLOPS)
    with found.forward(0):
        product()
        found.begin_part()
        found.end_part(FLOPS / 2, is_forward=True)  # half of the product
    with found.forward(0):
        found.begin_part()
        computing(0.25)
        found.end_part(1.5 * FLOPS, is_forward=True)
        computing(0.25)
    with found.exchanging_backward(lambda: math.inf):
        found.begin_part()
        computing(0.5)
        found.end_part(1.5 * FLOPS, is_forward=False)
    assert slept == [1.0, 1.25, 0.25, 2.5, 1.0]
    assert found.take_late() == 0.0
    found.end_part(FLOPS, is_forward=True)  # of an evaluation, which is not emulated
    assert len(slept) == 5


def test_parts_of_split_backward_passes_take_as_long_as_one_forward_pass(slept: list[float]) -> None:
    found = pace(flops=FLOPS)
    with found.queued(1, 1, PassSpan(0.0)):
        product()
        found.end_part(FLOPS / 2, is_forward=True)
    found.begin_queue()
    spans = [PassSpan(0.0) for _ in range(3)]
    for is_forward, times in zip((True, False, None), spans, strict=True):  # forward, for inputs, for weights
        with found.queued(1, 1, times):
            found.begin_part()
            if is_forward is not None:
                found.end_part(FLOPS, is_forward=is_forward)
    assert slept == [1.0, 1.0, 0.5, 1.0, 0.5, 1.5]
    assert [each.end - each.start for each in spans] == [1.5, 1.5, 1.5]
