"""Scaling and extrapolation: sizes of jobs and clusters, efficiencies, and a measured study on emulated nodes."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from shardscope.measure.scaling.result import Point, Scaling
from shardscope.measure.scaling.sizes import sized_cluster, sized_job
from shardscope_widgets.figures import scaling
from shardscope_widgets.figures._scaling import scaling_info, scaling_text

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64, steps=6)
POINTS = (
    Point("weak", 1, 32, predicted_s=0.2, measured_s=0.25),
    Point("weak", 4, 128, predicted_s=0.25, measured_s=0.5),
    Point("strong", 1, 32, predicted_s=0.2),
    Point("strong", 4, 32, predicted_s=0.1),
)
MORE = Point("weak", 8, 256, predicted_s=0.3, measured_s=0.625)
WEAK = Scaling(JOB, ss.Cluster.emulated(flops="1 GFLOP/s"), "four nodes", POINTS[:2])
FOUND = Scaling(JOB, None, "this machine", POINTS)


def test_weak_scaling_keeps_the_batch_per_worker_and_strong_scaling_the_global_batch() -> None:
    assert [sized_job(JOB, n, "weak").batch.global_batch for n in (1, 2, 8)] == [32, 64, 256]
    assert [sized_job(JOB, n, "strong").batch.global_batch for n in (1, 2, 8)] == [64, 64, 64]
    assert sized_job(JOB.replace(compression="fp16"), 1, "weak").strategy.name == "single"
    served = JOB.replace(strategy="parameter-server", batch=ss.Batch(global_batch=64, micro_batch=16))
    assert sized_job(served, 8, "strong").batch.micro_batch == 8


def test_a_cluster_gets_as_many_nodes_as_the_workers_fill() -> None:
    pair = ss.Cluster.emulated(nodes=4, per_node=2, slowdown={1: 2.0}, racks=2, rack_bandwidth="1 Gbit/s")
    sizes = [sized_cluster(pair, n) for n in (1, 2, 6)]
    assert [(len(each.nodes), each.per_node) for each in sizes] == [(1, 1), (1, 2), (3, 2)]
    assert [node.slowdown for node in sizes[2].nodes] == [1.0, 2.0, 1.0]
    assert sized_cluster(ss.Cluster.of("h100", per_node=8), 64).nodes == 8
    with pytest.raises(ss.SpecError, match="workers=3 do not fill nodes of 2 devices; use multiples of 2"):
        sized_cluster(pair, 3)


def test_efficiency_is_relative_to_the_fewest_workers() -> None:
    assert FOUND.efficiencies("measured_s") == [1.0, 0.5, None, None]
    assert FOUND.efficiencies("predicted_s") == [1.0, 0.8, 1.0, 0.5]
    assert [*FOUND.frame().columns] == [
        "kind", "workers", "global_batch", "measured_s", "predicted_s", "measured_efficiency", "predicted_efficiency"
    ]  # fmt: skip
    assert "50.0%" in repr(FOUND)
    assert "50.0%" in FOUND._repr_html_()


def test_the_figure_has_the_formula_beside_the_measurements() -> None:
    lines = {(line.kind, line.source): line for line in scaling_info(FOUND).lines}
    assert [*lines] == [("weak", "formula"), ("strong", "formula"), ("weak", "measured")]
    assert lines["weak", "measured"].efficiency == (1.0, 0.5)
    assert "Weak scaling, measured: 50.0% of the ideal on 4 workers, 500 ms per step." in scaling_text(
        scaling_info(FOUND)
    )
    assert len(scaling(FOUND).data) == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"workers": ()}, "workers is empty"),
        ({"workers": (2, 0)}, "workers has 0"),
        ({"kind": "week"}, "did you mean 'weak'?"),
        ({"cluster": ss.Cluster.of("h100")}, "emulated"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        ss.scaling(JOB, **arguments)  # type: ignore[arg-type]
    assert told in str(refused.value)


def test_an_extrapolation_is_what_predict_says() -> None:
    cluster = ss.Cluster.of("a100-80gb", per_node=8)
    found = ss.extrapolate(JOB, cluster, workers=(8, 128))
    last = found.points[-1]
    expected = ss.predict(sized_job(JOB, 128, "weak"), sized_cluster(cluster, 128))
    assert (last.workers, last.predicted_s, last.sent_bytes) == (
        128,
        expected.step_time_s,
        max(expected.sent_bytes),
    )
    assert [point.simulated_s is None for point in found] == [False, True]
    assert last.interval_s is not None
    assert last.interval_s.low < last.predicted_s < last.interval_s.high
    assert not found.is_measured


def test_measurements_stay_in_their_extrapolation_and_give_its_interval() -> None:
    found = ss.extrapolate(WEAK, ss.Cluster.emulated(7, flops="1 GFLOP/s"), workers=(4, 8))
    assert [(point.workers, point.measured_s) for point in found] == [(1, 0.25), (4, 0.5), (8, None)]
    last = found.points[-1]
    assert last.interval_s == pytest.approx((1.25 * last.predicted_s, 2.0 * last.predicted_s))
    assert "range of measured to predicted times" in found.note


def test_measurements_of_another_cluster_are_left_out_of_an_extrapolation() -> None:
    found = ss.extrapolate(WEAK, ss.Cluster.emulated(flops="2 GFLOP/s"), workers=(8,))
    assert [(point.workers, point.measured_s, point.interval_s) for point in found] == [(8, None, None)]
    rented = ss.extrapolate(WEAK, ss.Cluster.of("a100-80gb", per_node=8), workers=(8,))
    assert rented.points[0].interval_s is not None
    assert not rented.is_measured


def test_the_note_is_about_an_interval_from_measurements_only() -> None:
    cluster = ss.Cluster.of("a100-80gb", per_node=8)
    of_eight = Point("weak", 8, 256, predicted_s=0.2, measured_s=0.25)
    found = ss.extrapolate(Scaling(JOB, cluster, cluster.name, (of_eight,)), workers=(8, 16))
    assert found.is_measured
    assert found.note == ""


def test_efficiency_is_relative_to_the_fewest_workers_that_were_measured() -> None:
    found = Scaling(JOB, None, "this machine", (POINTS[0]._replace(measured_s=None), *POINTS[1:2], MORE))
    assert found.efficiencies("measured_s") == [None, 1.0, 0.8]


@pytest.mark.parametrize(
    ("job", "kind", "sizes"),
    [
        (JOB, "strong", [1, 2, 4, 8, 16, 32, 64]),
        (JOB.replace(strategy="pipeline"), "weak", [1, 2, 4]),
    ],
)
def test_default_sizes_are_those_that_suit_the_job(job: ss.Job, kind: Any, sizes: list[int]) -> None:
    cluster = ss.Cluster.of("a100-80gb", per_node=1)
    assert [point.workers for point in ss.extrapolate(job, cluster, kind=kind)] == sizes
    with pytest.raises(ss.SpecError):
        ss.extrapolate(job, cluster, kind=kind, workers=(1, 128))


@pytest.mark.slow
def test_it_runs_the_job_on_each_number_of_nodes() -> None:
    needs_namespaces()
    cluster = ss.Cluster.emulated(bandwidth="100 Mbit/s", flops="50 MFLOP/s", memory_bandwidth="1 GB/s")
    found = ss.scaling(JOB, workers=(1, 2), cluster=cluster)
    runs = {run.id: run for run in ss.runs(all=True)}
    assert [runs[point.run].job.world_size for point in found] == [1, 2]
    assert all(runs[point.run].made_by == "scaling" for point in found)
    assert all(point.measured_s > point.predicted_s / 2 for point in found)
    assert "computation is emulated, by sleeping: 50 MFLOP/s per rank" in found.note
    assert found.frame()["sent_bytes"].tolist()[0] == 0
