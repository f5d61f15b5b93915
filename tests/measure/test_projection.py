"""A step played again on another link: worked out by hand on small timelines, and held against real runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.runs import small_job
from shardscope.analytic.communication import collective_time
from shardscope.measure.projection import Projector, project
from shardscope.measure.replay import Rank, replay, step_of
from shardscope.measure.wire import Wire
from shardscope.training.meter import Span

LINK = ss.Link(bandwidth="100 Mbit/s", latency="2 ms")
SLOW = ss.Link(bandwidth="20 Mbit/s", latency="2 ms")
"""The wire decides, however busy the machine is."""


def rank(*spans: tuple[str, str, float, float], seconds: float) -> Rank:
    return step_of([Span(*span) for span in spans], seconds)


def test_a_bucket_hides_behind_the_rest_of_the_backward_pass_and_the_next_waits_for_it() -> None:
    step = rank(
        ("compute", "data", 0.0, 0.1),
        ("compute", "forward", 0.1, 1.0),
        ("compute", "backward", 1.0, 3.0),
        ("communication", "all_reduce", 2.0, 2.1),
        ("communication", "all_reduce", 3.0, 3.1),
        ("compute", "optimizer", 3.1, 3.5),
        seconds=3.6,
    )
    assert replay([step.fresh()], lambda span, took: took) == pytest.approx(3.6)
    assert replay([step.fresh()], lambda span, took: 0.5) == pytest.approx(4.0)  # the first is hidden whole
    assert replay([step.fresh()], lambda span, took: 2.0) == pytest.approx(
        6.5
    )  # 2 to 4, 4 to 6, and 0.5 more


def test_what_is_gathered_holds_up_the_pass_that_needs_it() -> None:
    step = rank(
        ("compute", "data", 0.0, 0.0),
        ("compute", "forward", 0.0, 1.0),
        ("communication", "ring_all_gather", 0.2, 0.3),
        ("compute", "backward", 1.0, 2.0),
        seconds=2.0,
    )
    assert step.compute_s == pytest.approx(1.9)
    assert replay([step], lambda span, took: 1.0) == pytest.approx(0.2 + 1.0 + 0.7 + 1.0)


def test_packing_delays_what_is_sent_and_the_slowest_rank_delays_all() -> None:
    def one(late: float) -> Rank:
        return rank(
            ("compute", "data", 0.0, 0.0),
            ("compute", "backward", 0.0, 1.0 + late),
            ("codec", "encode", 1.0 + late, 1.2 + late),
            ("communication", "packet_all_gather", 1.2 + late, 2.0),
            ("codec", "decode", 2.0, 2.3),
            ("compute", "optimizer", 2.3, 2.5),
            seconds=2.5,
        )

    assert replay([one(0.0), one(0.4)], lambda span, took: took) == pytest.approx(2.5)
    assert replay([one(0.0), one(0.4)], lambda span, took: 5.0) == pytest.approx(1.6 + 5.0 + 0.5)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.Linear(256, 10)
    )


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "parameter-server", "zero-3"])
def test_a_run_on_the_machines_own_link_tells_the_step_time_on_another(strategy: Any) -> None:
    job = small_job(strategy=strategy, model=make_model)
    plain, slowed = ss.launch(job).wait(60), ss.launch(job.replace(link=SLOW, steps=8)).wait(60)
    measured = float(slowed.metrics()["step_time_s"].iloc[2:].min())  # the least disturbed: noise only adds
    told = project(plain, SLOW)
    assert told.step_s == pytest.approx(measured, rel=0.3)  # 0.15 on a quiet machine: see the benchmark
    assert told.wire_s <= measured
    assert told.step_s == pytest.approx(told.compute_s + told.exposed_s)
    assert project(slowed, SLOW).step_s == pytest.approx(measured, rel=0.2)


def test_what_cannot_be_projected_is_refused() -> None:
    run = ss.launch(small_job(strategy="pipeline:gpipe", steps=2)).wait(60)
    with pytest.raises(
        ss.SpecError, match="strategy='pipeline:gpipe' cannot be projected .* run the job on that link"
    ):
        project(run, LINK)
    run = ss.launch(small_job(steps=2, compression=ss.Compression("local-sgd", every=2))).wait(60)
    with pytest.raises(ss.SpecError, match="its steps differ; run the job on that link"):
        project(run, LINK)
    run = ss.launch(small_job(steps=2, compression=ss.Compression("powersgd", warmup_steps=1))).wait(60)
    with pytest.raises(ss.SpecError, match="its steps differ"):
        project(run, LINK)
    run = ss.launch(small_job(steps=2, link=LINK, record=ss.Record(spans_first=0))).wait(60)
    with pytest.raises(ss.SpecError, match="cannot be projected to the machine's own link"):
        project(run, None)
    with pytest.raises(ss.SpecError, match="no step with recorded spans"):
        project(run, LINK)


def test_a_run_that_was_stopped_before_its_first_event_is_refused_in_a_sentence() -> None:
    job = small_job(steps=2)
    run = SimpleNamespace(id="early", job=job, resized_job=job, events=list)
    with pytest.raises(ss.SpecError, match="run early has no step with recorded spans"):
        Projector(run)  # type: ignore[arg-type]


@pytest.mark.parametrize("slice_mb", [1, 2, 8])
def test_a_tree_is_timed_in_the_slices_of_its_job(slice_mb: int) -> None:
    job, payload = (
        ss.Job(model="mlp", data="digits", strategy=ss.Tree(slice_mb=slice_mb), world_size=4),
        8 << 20,
    )
    taken = Wire(job, "gloo").seconds("tree_all_reduce", payload, LINK, {})
    expected = collective_time(
        op="all_reduce", algorithm="pipelined-tree", num_bytes=payload, workers=4,
        bandwidth=LINK.bandwidth, latency=LINK.latency_s, segments=8 // slice_mb,
    )  # fmt: skip
    assert taken == pytest.approx(float(expected))
