"""Training time with failures, at a stated failure rate of a device: in predictions, plans and on the command line."""

from __future__ import annotations

import json

import pytest

import shardscope as ss
from shardscope.analytic import reliability
from shardscope.analytic.memory.states import checkpoint_bytes
from shardscope.cli import main
from shardscope.errors import SpecError
from shardscope.planner import Plans
from shardscope_widgets import figures

HOURS = 50_000.0
CLUSTER = ss.Cluster.of("a100-80gb", nodes=384, per_node=8)
MODEL = ss.Model.of("megatron-1t")
LAYOUT = ss.Layout(
    data=6, tensor=8, pipeline=64, micro_batch=1, global_batch=3072, recompute="full", precision="fp16-mixed"
)


def test_a_checkpoint_of_a_trillion_parameters_has_the_published_size() -> None:
    """Narayanan et al. 2021 (arXiv 2104.04473, section 5.10): 13.8 terabytes."""
    size = checkpoint_bytes(MODEL.num_params, precision="fp16-mixed")
    assert float(size) == pytest.approx(13.8e12, rel=0.03)


def test_without_a_failure_rate_nothing_changes() -> None:
    found = ss.predict(MODEL, CLUSTER, LAYOUT)
    assert found.goodput is None
    assert found.reliability is None
    assert found.time_to_train(1e9) == pytest.approx(1e9 / found.tokens_per_s)


def test_time_and_cost_include_checkpoints_and_failures() -> None:
    plain = ss.predict(MODEL, CLUSTER, LAYOUT)
    found = ss.predict(MODEL, CLUSTER.replace(device_mtbf_hours=HOURS), LAYOUT)
    save_s = 14 * MODEL.num_params / (384 * CLUSTER.storage_bandwidth)
    said = reliability.expected(
        mtbf_s=HOURS * 3600 / 3072, save_s=save_s, restart_s=CLUSTER.restart_s + save_s
    )
    assert found.goodput == pytest.approx(float(said.goodput))
    assert 0.8 < found.goodput < 0.97
    assert found.time_to_train(300e9) == pytest.approx(plain.time_to_train(300e9) / found.goodput)
    assert found.dollars(1e9) == pytest.approx(plain.dollars(1e9) / found.goodput)
    assert "One of 3,072 devices fails every 16.3 h" in repr(found)
    assert f"goodput is {found.goodput:.1%}" in repr(found)
    assert found.to_dict()["goodput"] == found.goodput


def test_goodput_falls_with_the_number_of_devices_and_rises_with_faster_storage() -> None:
    def goodput(nodes: int, **changes: float) -> float:
        cluster = ss.Cluster.of("h100-80gb", nodes=nodes, device_mtbf_hours=HOURS).replace(**changes)
        layout = ss.Layout(data=nodes, tensor=8, global_batch=4096, micro_batch=1, zero=3)
        return ss.predict(ss.Model.of("llama-3-70b"), cluster, layout).goodput or 0.0

    few, many = goodput(64), goodput(4096)
    assert many < few < 1
    assert goodput(4096, storage_bandwidth=1e10) > many
    assert goodput(4096, restart_s=3600.0) < many


def test_groups_of_a_mixed_cluster_add_up_their_failure_rates() -> None:
    one = ss.Cluster.of("a100-80gb", nodes=2, device_mtbf_hours=10_000)
    other = ss.Cluster.of("h100-80gb", nodes=2, device_mtbf_hours=30_000)
    mixed = ss.Cluster.mixed(one, other)
    assert mixed.device_mtbf_hours == pytest.approx(32 / (16 / 10_000 + 16 / 30_000))
    assert mixed.num_nodes == 4
    assert ss.Cluster.mixed(one, other.replace(device_mtbf_hours=None)).device_mtbf_hours is None


def test_a_job_saves_at_its_own_interval() -> None:
    cluster = ss.Cluster.of("h100-80gb", nodes=1, per_node=4, device_mtbf_hours=1.0)
    job = ss.Job(model="gpt-mini", data="python-source", strategy="zero-3", world_size=4)
    best, rare = (
        ss.predict(job.replace(checkpoint=ss.Checkpoint(every=every)), cluster) for every in (None, 100_000)
    )
    assert best.goodput > rare.goodput > 0
    assert float(rare.reliability.interval_s) == pytest.approx(100_000 * rare.step_time_s)
    assert ss.predict(job).goodput is None


def test_a_training_that_never_ends_says_so() -> None:
    doomed = CLUSTER.replace(device_mtbf_hours=1e-3, restart_s=86400.0)
    with pytest.raises(SpecError, match="training never ends; raise the cluster's device_mtbf_hours"):
        ss.predict(MODEL, doomed, LAYOUT).time_to_train(1e9)


def test_plans_and_their_pages_count_failures() -> None:
    def planned(hours: float | None) -> Plans:
        cluster = ss.Cluster.of("a100-80gb", nodes=128, device_mtbf_hours=hours)
        return ss.plan("gpt3-175b", cluster, global_batch=1536, top=2, fix={"tensor": 8, "zero": 1})

    from shardscope.planner.table import budget_of

    plain, failing = planned(None), planned(HOURS)
    assert plain.best.step_time_s == failing.best.step_time_s
    goodput = ss.predict(failing.asked.model, failing.asked.cluster, failing.best.layout).goodput
    days = [budget_of(plans, plans.best, 300e9).days for plans in (plain, failing)]
    assert days[1] == pytest.approx(days[0] / goodput)
    assert "devices fails every" in figures.plans_text(failing, tokens=300e9)
    assert "fails every" not in figures.plans_text(plain, tokens=300e9)


def test_the_command_line_takes_the_failure_rate(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "predict",
        "llama-3-8b",
        "h100-80gb",
        "--global-batch",
        "8",
        "--data",
        "8",
        "--zero",
        "3",
        "--tokens",
        "1e12",
        "--json",
    ]
    main(command)
    plain = json.loads(capsys.readouterr().out)
    main([*command, "--device-mtbf-hours", "50"])
    failing = json.loads(capsys.readouterr().out)
    assert plain["goodput"] is None
    assert failing["hours"] == pytest.approx(plain["hours"] / failing["goodput"])
