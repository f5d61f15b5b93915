"""Predictions for ranks of different speeds: what a step waits for, and how many gradients are used per second."""

from __future__ import annotations

import math
from typing import Any

import pytest

import shardscope as ss
from shardscope.analytic.memory import tensor_room
from shardscope.analytic.stragglers import expected_slowest
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.loads import awaited, gradients_per_s, rank_loads
from shardscope.simulator import Simulation

SLOW = {3: 2.0}


def predicted(slowdown: dict[int, float] | None = None, **changes: Any) -> JobPrediction:
    fields = {"model": "mlp", "data": "digits", "strategy": "ring", "world_size": 4, "batch": 56, **changes}
    cluster = ss.Cluster.emulated(nodes=fields["world_size"], flops="2 MFLOP/s", slowdown=slowdown)
    return ss.predict(ss.Job(**fields), cluster)


def passes_s(prediction: JobPrediction) -> float:
    assert prediction.time is not None
    return prediction.time["forward"].value + prediction.time["backward"].value


def slow_down(**changes: Any) -> float:
    return predicted(**changes).samples_per_s / predicted(SLOW, **changes).samples_per_s


def test_ranks_that_meet_wait_for_the_slowest() -> None:
    assert passes_s(predicted(SLOW)) == pytest.approx(2 * passes_s(predicted()))
    assert slow_down() == pytest.approx(2.0, rel=0.05)
    assert slow_down(compression="local-sgd") == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("shares", [(2, 2, 2, 1), "measured"])
def test_work_shared_by_speed_leaves_the_harmonic_mean(shares: Any) -> None:
    """Three ranks of speed 1 and one of speed 1/2 do the work of 3.5."""
    found = predicted(SLOW, batch=ss.Batch(56, shares=shares))
    assert passes_s(found) == pytest.approx(passes_s(predicted()) * 4 / 3.5)
    assert [each.computing for each in rank_loads(found.step)] == pytest.approx(
        [rank_loads(found.step)[0].computing] * 4
    )


def test_uneven_shares_on_even_ranks_take_as_long_as_the_most() -> None:
    found = predicted(batch=ss.Batch(56, shares=(4, 1, 1, 1)))
    assert passes_s(found) == pytest.approx(passes_s(predicted()) * 32 / 14)


@pytest.mark.parametrize("strategy", ["ring", "zero-3", "zero-1"])
def test_each_rank_holds_the_activations_of_its_own_samples(strategy: str) -> None:
    """With uneven shares; memory that does not depend on samples is that of equal shares."""
    uneven, even = (
        predicted(strategy=strategy, batch=ss.Batch(56, shares=shares)) for shares in ((4, 2, 1, 1), None)
    )
    held = uneven.kinds["activations"]
    assert held / held[3] == pytest.approx([4, 2, 1, 1])
    assert held.sum() == pytest.approx(even.kinds["activations"].sum())
    assert uneven.by_rank is not None
    peaks = [term.value for term in uneven.by_rank]
    assert peaks[0] > peaks[1] > peaks[2]
    assert uneven.memory is not None
    assert uneven.memory.value == peaks[0]
    in_equal_passes = predicted(strategy="ring", batch=ss.Batch(56, micro_batch=7, shares=(4, 2, 1, 1)))
    assert len(set(in_equal_passes.kinds["activations"])) == 1


def test_uneven_shards_wait_for_the_largest_update_and_the_largest_chunk() -> None:
    fields: dict[str, Any] = {"model": "gpt-nano", "data": "python-source", "world_size": 4, "batch": 8}
    cluster = ss.Cluster.emulated(4, "50 Mbit/s", flops="1 GFLOP/s", memory_bandwidth="20 MB/s")
    even, uneven = (
        ss.predict(ss.Job(strategy=ss.Zero1(shards=shards), **fields), cluster)
        for shards in (None, (5, 1, 1, 1))
    )
    assert even.time is not None
    assert uneven.time is not None
    assert uneven.time["optimizer"].value == pytest.approx(2.5 * even.time["optimizer"].value, rel=1e-3)
    assert uneven.sent_bytes.sum() == even.sent_bytes.sum()
    simulated = [ss.simulate.predicted(each).step_time_s for each in (even, uneven)]
    assert uneven.step_time_s is not None
    assert uneven.step_time_s == pytest.approx(simulated[1], rel=0.01)
    assert uneven.step_time_s > 1.5 * simulated[0]


def test_collectives_with_uneven_chunks_follow_one_another_as_in_a_simulation() -> None:
    fields: dict[str, Any] = {"model": "gpt-nano", "data": "python-source", "world_size": 4, "batch": 8}
    cluster = ss.Cluster.emulated(4, "50 Mbit/s", flops="20 GFLOP/s")
    for stage in (ss.Zero1, ss.Zero2):
        found = ss.predict(ss.Job(strategy=stage(shards=(5, 1, 1, 1), bucket_mb=0.2), **fields), cluster)
        assert found.step_time_s == pytest.approx(ss.simulate.predicted(found).step_time_s, rel=0.01)


def test_the_interval_contains_steps_in_which_messages_of_uneven_chunks_do_not_wait() -> None:
    """In training, ranks that are done early begin the next step early: 0.38 s were measured for 0.416 s predicted."""
    cluster = ss.Cluster.emulated(4, "50 Mbit/s", flops="20 GFLOP/s")
    fields: dict[str, Any] = {"model": "gpt-nano", "data": "python-source", "world_size": 4, "batch": 24}
    even, uneven = (
        ss.predict(ss.Job(strategy=ss.Zero1(shards=shards), **fields), cluster)
        for shards in (None, (2, 1, 1, 1))
    )
    assert even.interval is not None
    assert uneven.interval is not None
    assert even.step_time_s is not None
    assert uneven.step_time_s is not None
    assert uneven.time is not None
    below = even.step_time_s - even.interval.low
    assert below < 0.05 * even.step_time_s
    terms = uneven.time["communication"]
    chained = sum(part.value for part in terms.parts) / 3
    """Three hops with the largest chunk, 2/5 of a bucket; a rank sends no more than 4/5 of it."""
    assert uneven.step_time_s - uneven.interval.low == pytest.approx(chained + below, rel=0.1)
    assert uneven.interval.low < 0.38 < uneven.interval.high


def test_backup_workers_do_not_wait_for_the_slowest() -> None:
    found = predicted(SLOW, strategy=ss.ParameterServer(backups=1))
    assert "the busiest rank sends at most " in repr(found)
    assert passes_s(found) == pytest.approx(passes_s(predicted()))
    assert awaited(found.step, rank_loads(found.step)).computing == 0.5
    assert slow_down(strategy=ss.ParameterServer(backups=1)) == pytest.approx(1.0)
    assert found.traffic is not None
    assert not found.traffic["server_push"].is_exact, "a slow worker skips steps that ended without it"
    two = predicted({2: 2.0, 3: 2.0}, strategy=ss.ParameterServer(backups=1))
    assert passes_s(two) == pytest.approx(2 * passes_s(predicted()))


def test_a_slow_stage_is_the_bottleneck_of_a_pipeline() -> None:
    pipeline = ss.Pipeline(split="even")
    even, slow = (predicted(each, strategy=pipeline, world_size=2, batch=64) for each in (None, {1: 3.0}))
    heavy = max(rank_loads(even.step), key=lambda each: each.computing)
    loads = rank_loads(slow.step)
    assert loads[0].computing == pytest.approx(rank_loads(even.step)[0].computing / 3)
    assert loads[1].computing == pytest.approx(rank_loads(even.step)[1].computing)
    assert loads[0].computing + loads[0].waiting == pytest.approx(loads[1].computing + loads[1].waiting)
    assert heavy.computing <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"strategy": "zero-3"}, {"batch": ss.Batch(56, shares=(2, 2, 2, 1))},
        {"strategy": "parameter-server"}, {"strategy": ss.Pipeline(split="even"), "batch": 64},
    ],
)  # fmt: skip
def test_the_simulation_has_the_same_computing_times(changes: dict[str, Any]) -> None:
    """Per rank: what the formulas say of the rank that is waited for, times its own work."""
    prediction = predicted(SLOW, **changes)
    loads = rank_loads(prediction.step)
    scale = passes_s(prediction) / awaited(prediction.step, loads).computing
    simulated = ss.simulate.predicted(prediction)
    busy = computing_by_rank(simulated)
    assert busy == pytest.approx([each.computing * scale for each in loads], rel=1e-6)


def test_a_step_that_does_not_wait_for_the_slowest_is_not_simulated() -> None:
    """It would take as long as the slowest worker, of which `predict` says that no one waits for it."""
    with pytest.raises(
        ss.SpecError, match="'parameter-server, 1 backup' drops the gradients of the slowest workers"
    ):
        ss.simulate.predicted(predicted(SLOW, strategy=ss.ParameterServer(backups=1)))


def computing_by_rank(simulated: Simulation) -> list[float]:
    seconds = [0.0] * simulated.num_devices
    for event in simulated.timeline.events:
        if event.kind in ("forward", "backward"):
            seconds[event.rank] += event.end_s - event.start_s
    return seconds


def test_a_bound_on_staleness_lies_between_synchronous_and_asynchronous() -> None:
    cycles = [1.0, 1.0, 1.0, 2.0]
    rates = [gradients_per_s(bound, cycles) for bound in (0, 1, 2, 5, math.inf)]
    assert rates[0] == pytest.approx(4 / 2)
    assert rates[-1] == pytest.approx(3.5, rel=0.02)
    assert rates == sorted(rates)
    assert gradients_per_s(0, [1.0] * 4) == gradients_per_s(math.inf, [1.0] * 4) == pytest.approx(4.0)


def test_bounded_staleness_loses_less_to_a_straggler() -> None:
    loss = [slow_down(strategy=strategy) for strategy in (
        "parameter-server", ss.ParameterServer(mode="ssp", staleness=8), "parameter-server:async",
    )]  # fmt: skip
    assert loss[0] > 1.8
    assert loss[1] == pytest.approx(8 / 7, rel=0.05)
    assert loss[2] == pytest.approx(8 / 7, rel=0.05)


def test_simulated_jitter_is_the_expected_maximum() -> None:
    """The step of a ring of 16 ranks, over many seeds: the same figure as the integral over order statistics."""
    cluster = ss.Cluster.emulated(nodes=16, flops="2 MFLOP/s")
    prediction = ss.predict(
        ss.Job(model="mlp", data="digits", strategy="all-reduce", world_size=16, batch=64), cluster
    )
    alone = ss.simulate.predicted(prediction).step_time_s
    times = [ss.simulate(prediction.job, cluster, jitter=0.1, seed=seed).step_time_s for seed in range(200)]
    assert prediction.time is not None
    parts = [prediction.time["forward"].value, prediction.time["backward"].value]
    std = 0.1 * math.hypot(*parts)
    expected = float(expected_slowest(sum(parts), std, 16)) - sum(parts)
    assert sum(times) / len(times) - alone == pytest.approx(expected, rel=0.15)


def test_the_rank_that_does_not_fit_is_named_even_if_it_is_not_the_fullest() -> None:
    job = ss.Job(model="mlp", data="digits", strategy=ss.Zero1(shards=(4, 1)), world_size=2, batch=64)
    cluster = ss.Cluster.emulated(2, flops="1 GFLOP/s", node_memory={0: "100 MB", 1: "0.1 MB"})
    found = ss.predict(job, cluster)
    assert found.by_rank[0].value > found.by_rank[1].value
    assert found.overfull == (1,)
    assert found.fits is False
    assert "; rank 1 does not fit" in repr(found)


def test_a_job_on_gpus_fits_if_its_tensors_do_beside_the_context_as_a_layout_does() -> None:
    job = ss.Job(model="mlp", data="digits", strategy="zero-1", world_size=2, batch=64)
    node = ss.Cluster.of("a100-80gb", nodes=1, per_node=2)
    peak = ss.predict(job, node).peak_bytes
    assert peak is not None
    for more, fits in ((1e6, False), (40e6, True)):  # 1 MB would suffice without what the allocator keeps
        device = node.device.replace(memory_bytes=20e6 + peak + more, context_bytes=20e6)
        found = ss.predict(job, node.replace(device=device))
        assert (found.fits, found.overfull) == (fits, () if fits else (0, 1))
        largest = 32 * found.step.trace.largest_bytes
        assert found.step.memory == (tensor_room(device, "fsdp2", largest_bytes=largest),) * 2


@pytest.mark.parametrize(("shards", "is_assumed"), [((1, 1), False), ((4, 1), True)])
def test_it_is_said_that_steps_with_uneven_shards_may_take_longer(
    shards: tuple[int, int], is_assumed: bool
) -> None:
    found = predicted(strategy=ss.Zero1(shards=shards), world_size=2)
    assert ("are uneven" in " ".join(found.assumptions)) == is_assumed
