"""Laws of predictions: more of anything is never slower, and less never needs more memory.

`tests/campaigns/laws.py` tries thousands of draws.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from conformance.laws import broken_by_job, broken_by_layout
from shardscope.analytic.schedules import build, closed
from shardscope.analytic.schedules.closed import Case, counted_bubble
from shardscope.prediction.loads import gradients_per_s
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules


def draws(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Durations of forwards, input and weight gradients; and some of them shorter."""
    source = np.random.default_rng(seed)
    durations = np.exp(source.normal(0, 1, (3, count)))
    return durations, durations * np.where(
        source.random((3, count)) < 0.5, 1, source.uniform(0.1, 1, (3, count))
    )


@pytest.mark.parametrize("ranks_meet", [False, True])
@pytest.mark.parametrize("schedule", schedules(), ids=lambda schedule: schedule.name)
def test_shorter_passes_never_make_a_step_longer(schedule: PipelineSchedule, ranks_meet: bool) -> None:
    """By the closed forms, also with fewer micro-batches than those are exact for."""
    source, count = np.random.default_rng(1), 20_000
    ranks = source.integers(1, 33, count)
    least = 2 * ranks if schedule.name == "dualpipev" else np.ones(count, int)
    micro_batches = np.maximum(source.integers(1, 65, count), least)
    held = np.where(schedule.most_stages is None, source.integers(2, 4, count), schedule.default_stages)
    if schedule.most_stages is None:  # these run micro-batches in rounds of as many as there are ranks
        micro_batches = ranks * source.integers(1, 5, count)
    index = schedules().index(schedule)

    def steps(durations: np.ndarray) -> np.ndarray:
        waits = closed.bubble_time(index, ranks, micro_batches, held, *durations, ranks_meet=ranks_meet)
        return micro_batches * durations.sum(axis=0) + waits

    longer, shorter = draws(2, count)
    assert (steps(shorter) <= steps(longer) * (1 + 1e-9)).all()


@pytest.mark.sampled
@pytest.mark.parametrize("ranks_meet", [False, True])
@pytest.mark.parametrize("schedule", schedules(), ids=lambda schedule: schedule.name)
def test_nor_do_they_by_a_table(schedule: PipelineSchedule, ranks_meet: bool) -> None:
    """As for schedules of users, which have no closed form."""
    source, (longer, shorter) = random.Random(3), draws(4, 40)
    for one, other in zip(longer.T, shorter.T, strict=True):
        ranks = source.choice((2, 3, 4, 6))
        held = schedule.default_stages if schedule.most_stages is not None else 2
        micro_batches = ranks * source.choice((2, 3))

        def step(durations: np.ndarray, p: int = ranks, m: int = micro_batches, v: int = held) -> float:
            case = Case(*map(np.asarray, (p, m, *durations)))
            return float(m * v * durations.sum() + counted_bubble(schedule, case, v, ranks_meet=ranks_meet))

        assert step(other) <= step(one) * (1 + 1e-9)


def test_the_longest_own_path_is_the_span_of_equal_passes() -> None:
    for schedule in schedules():
        held = schedule.default_stages if schedule.most_stages is not None else 2
        timeline = build(schedule, 4, 8, held).timeline()
        assert timeline.longest_own_path == pytest.approx(timeline.step_time)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zero-bubble"])
@pytest.mark.parametrize("waits_for", [{"offload": "activations"}, {"zero": 2}, {"zero": 3, "data": 4}])
def test_faster_computation_does_not_move_waits_from_one_half_of_the_backward_pass_to_the_other(
    schedule: str, waits_for: dict[str, Any]
) -> None:
    """Where they are longer than the pass, so that its length is theirs: of ZB-H2, twice the FLOP/s cost 5 % here."""
    held = 2 if schedule == "zero-bubble" else 1
    layout = ss.Layout(
        **{"data": 2, **waits_for}, pipeline=4, micro_batch=4, global_batch=128 if held == 2 else 32,
        schedule=schedule, virtual_stages=held, precision="fp32",
    )  # fmt: skip
    cluster = ss.Cluster.of("h100-80gb", nodes=layout.num_devices // 4, per_node=4)
    cluster = cluster.replace(inter=ss.Link.of("1 Gbit/s", latency_s=0.0))
    device, model = cluster.device, ss.Model.of("llama-2-13b")
    times = [
        ss.predict(
            model,
            cluster.replace(
                device=device.replace(peak_flops={k: more * v for k, v in device.peak_flops.items()})
            ),
            layout,
        ).step_time_s
        for more in (1.0, 1.5, 2.0, 4.0, 16.0)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(times))


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_a_faster_emulated_processor_never_takes_longer(strategy: str) -> None:
    """Also where it is so fast that its sleep no longer hides the gathering of parameters."""
    job = ss.Job(model="gpt-nano", data="python-source", strategy=strategy, world_size=2, batch=16)
    times = [
        ss.predict(job, ss.Cluster.emulated(2, flops=10**power)).step_time_s
        for power in np.linspace(9, 11, 12)
    ]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(times))


def test_a_faster_rank_does_not_add_the_fixed_times_of_a_schedule() -> None:
    """They arise in each micro-batch, also where one rank never waits: 84 % of a step here."""
    job = ss.Job(
        model="mlp", data="digits", strategy="pipeline:zb-h1", world_size=3, batch=ss.Batch(12, micro_batch=2),
        optimizer=ss.Optimizer("sgd", lr=0.1),
    )  # fmt: skip
    before, after = (
        ss.predict(
            job, ss.Cluster.emulated(3, bandwidth=6e6, flops=4.4e9, slowdown={0: 3.0, 1: slow, 2: 1.0})
        )
        for slow in (3.0, 1.0)
    )
    assert before.time["idle"]["schedule"].value == after.time["idle"]["schedule"].value > 0
    assert after.step_time_s <= before.step_time_s


@pytest.mark.parametrize("carried_by", ["nodes", "racks"])
@pytest.mark.parametrize("strategy", ["ring", "hierarchical", "zero-3"])
def test_faster_nodes_do_not_make_messages_longer_that_racks_carry(strategy: str, carried_by: str) -> None:
    """The cores handle messages while links carry others, whichever link it is that limits them."""
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=8, batch=32, compression="fp16")
    times = [
        ss.predict(
            job,
            ss.Cluster.emulated(
                8, bandwidth=10**power, flops=1e9, racks=2,
                rack_bandwidth=4e8 if carried_by == "racks" else 10**power,
            ),
        ).step_time_s
        for power in np.linspace(7.5, 9.5, 9)
    ]  # fmt: skip
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(times))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_laws_of_layouts(seed: int) -> None:
    assert broken_by_layout(random.Random(seed)) == []


def test_more_flops_do_not_change_other_constants() -> None:
    """Host traffic alone sets the time of these passes, so that a step with a longer fixed cost would be longer."""
    layout = ss.Layout(
        tensor=4, pipeline=8, global_batch=4, micro_batch=4, sequence_parallel=True, offload="activations"
    )
    cluster = ss.Cluster.of("h100-80gb", nodes=4)
    peaks = {precision: 10 * rate for precision, rate in cluster.device.peak_flops.items()}
    better = cluster.replace(device=cluster.device.replace(peak_flops=peaks))
    usual, now = (ss.predict("gemma-2-9b", each, layout).step_time_s for each in (cluster, better))
    assert now <= usual


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(1, 9))
def test_laws_of_jobs(seed: int) -> None:
    assert broken_by_job(random.Random(seed)) == []


@pytest.mark.parametrize("bound", [0, math.inf])
def test_a_faster_worker_never_lowers_the_rate_of_updates(bound: float) -> None:
    """With a bound between the two it may; the docstring of `gradients_per_s` says why."""
    source = random.Random(5)
    for _ in range(500):
        cycles = [source.uniform(0.1, 6.0) for _ in range(source.choice((2, 3, 4, 6)))]
        faster = list(cycles)
        faster[source.randrange(len(cycles))] *= source.uniform(0.3, 1.0)
        assert gradients_per_s(bound, faster) >= gradients_per_s(bound, cycles) * (1 - 1e-9)
