"""`ss.predict(job)`: what its figures are made of, on this machine and on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import run_on
from shardscope.analytic.communication.traffic import Sent
from shardscope.calibration.host_calibration import Constant, HostCalibration, HostMachine
from shardscope.machine import can_share_memory
from shardscope.prediction import loads
from shardscope.prediction.rates import RankRates
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.spec.strategy import Work

CLUSTER = ss.Cluster.of("a100-80gb", per_node=4)
STRATEGIES = [
    "single",
    "all-reduce",
    "ring",
    "tree",
    "hierarchical",
    "gossip",
    "parameter-server",
    "pipeline",
    "zero-1",
    "zero-2",
    "zero-3",
]


def job_of(strategy: Any = "ring", **fields: Any) -> ss.Job:
    fields = {"model": "gpt-nano", "data": "python-source", "world_size": 4, "steps": 3, **fields}
    if strategy == "single":
        del fields["world_size"]
    return ss.Job(strategy=strategy, **fields)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_predicted_and_its_terms_add_up(strategy: str) -> None:
    found = ss.predict(job_of(strategy))
    assert found.memory is not None
    assert found.fits
    for term in (found.time, found.memory):
        assert term.value == pytest.approx(sum(part.value for part in term.parts))
        assert all(part.value > 0 for part in term.parts)
        assert all(leaf.source for leaf in term.walk() if not leaf.parts)
    assert len(found.sent_bytes) == found.job.world_size
    assert found.frame()["bytes"].sum() == found.sent_bytes.sum()
    assert json.loads(json.dumps(found.to_dict()))["peak_bytes"] == found.peak_bytes
    assert "step " in repr(found) and "<details" in found._repr_html_()


@pytest.mark.parametrize("model", ["gpt-nano", "resnet"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_has_the_names_and_the_bytes_of_each_type(strategy: str, model: str) -> None:
    """A term that is not a type's own peak has another name, which says so."""
    job = job_of(strategy, model=model, data="digits" if model == "resnet" else "python-source")
    found = ss.predict(job)
    assert found.by_rank is not None
    for rank, memory in enumerate(found.by_rank):
        terms = {part.name: part.value for part in memory.parts}
        shared = terms.keys() & set(MEMORY_KINDS)
        assert "parameters" in shared
        assert {name: terms[name] for name in shared} == {name: found.kinds[name][rank] for name in shared}
        assert all(name == "batch" or name.endswith(" at the peak") for name in terms.keys() - shared)


def test_a_transformer_takes_its_layouts_time_on_a_cluster() -> None:
    job = job_of("zero-3", precision="bf16-mixed")
    config = MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    layout = ss.predict(config.transformer("gpt-nano"), CLUSTER, job.layout())
    assert ss.predict(job, CLUSTER).step_time_s == layout.step_time_s


def test_a_model_without_a_layout_takes_the_time_of_its_operations() -> None:
    found = ss.predict(ss.Job(model="cnn", data="digits", strategy="ring", world_size=4), CLUSTER)
    assert found.time["matrix products"].inputs["FLOP"] > 0
    forward, backward = (found.time[name]["matrix products"].value for name in ("forward", "backward"))
    assert backward == pytest.approx(2 * forward)
    twice = ss.predict(found.job.replace(batch=2 * found.job.batch.global_batch), CLUSTER)
    before, after = (each.time["matrix products"] for each in (found, twice))
    assert after.inputs["FLOP"] == pytest.approx(2 * before.inputs["FLOP"])
    assert before.value < after.value < 2 * before.value, "weights are read once, whatever the batch"


def test_a_backward_pass_repeats_all_operations_that_it_recomputes() -> None:
    plain, recomputing = (ss.predict(job_of("single", recompute=mode)).time for mode in ("none", "full"))
    for part, number in (
        ("matrix products", "FLOP"),
        ("other operations", "bytes"),
        ("launches", "operations"),
    ):
        forward, backward, longer = (
            time[phase][part].inputs[number]
            for time, phase in ((plain, "forward"), (plain, "backward"), (recomputing, "backward"))
        )
        assert longer == pytest.approx(backward + forward, rel=1e-12)
        assert recomputing["forward"][part].inputs[number] == forward > 0


def test_a_peak_without_buffers_that_are_unknown_says_so() -> None:
    lacking = "plus work buffers (not predicted)"
    job = ss.Job(model="mlp", data="digits", strategy="zero-2", world_size=2, batch=8)
    assert lacking not in str(ss.predict(job))
    ring = job.replace(strategy="ring", compression=ss.Compression("adaptive-rank"))
    assert lacking in str(ss.predict(ring))


def test_shards_go_through_shared_buffers_only_between_ranks_of_one_host() -> None:
    job = ss.Job(model="mlp", data="digits", strategy="zero-3", world_size=2, batch=8)
    shared, ring = ss.predict(job), ss.predict(job, ss.Cluster.emulated(nodes=2))
    buffers = [found.kinds["buffers"].max() for found in (shared, ring)]
    assert (buffers[0] > buffers[1]) == can_share_memory()
    lacking = ss.predict(job.replace(record=ss.Record(messages_first=0))).kinds["buffers"].max()
    assert lacking < buffers[0], "a step whose messages are logged fills the ring's buffers as well"


def test_a_budget_of_tokens_takes_days_and_dollars() -> None:
    found = ss.predict(job_of("ring"), CLUSTER)
    seconds = found.time_to_train(1e9)
    assert seconds == pytest.approx(1e9 / (found.job.batch.global_batch * 64) * found.step_time_s)
    assert found.dollars(1e9) == pytest.approx(seconds / 3600 * 4 * (CLUSTER.price_per_device_hour or 0))
    with pytest.raises(ss.SpecError, match="this machine, which has no price"):
        ss.predict(job_of("ring")).dollars(1e9)
    with pytest.raises(ss.SpecError, match="has no known sequence length"):
        ss.predict(ss.Job(model="mlp", data="digits")).time_to_train(1e9)


def test_messages_of_sleeping_ranks_wait_for_each_other_at_the_cores() -> None:
    """The time of a message grows with the ranks that send at the same time, and contains that of few bytes."""
    job = ss.Job(model="mlp", data="digits", strategy="zero-3", world_size=64, batch=64)
    cluster = ss.Cluster.emulated(nodes=64, flops="1 GFLOP/s")
    host = HostCalibration.shipped()
    none, one, all_of_them = np.zeros(64, int), np.array([3] + 63 * [0]), np.array(64 * [3])
    kept = tuple(row for row in host.constants if row.name != "woken_message_s")
    measured = tuple(
        Constant(name="woken_message_s", transport="tcp", ranks=ranks, value=value, low=value, high=value)
        for ranks, value in ((2, 1e-4), (64, 2e-3))
    )
    here = HostMachine.here()
    host = host.replace(constants=(*kept, *measured), machine=here)
    rates = RankRates.of_this_machine(job, [Work(1.0)] * 64, host, emulated=cluster)
    assert rates.per_message_s("agreement", Sent(none, one)) == pytest.approx(1e-4)
    assert rates.per_message_s("agreement", Sent(none, all_of_them)) == pytest.approx(2e-3)
    few = int(5e-4 * rates.link)
    carried = rates.per_message_s("agreement", Sent(3 * few + none, all_of_them))
    assert carried + few / rates.link == pytest.approx(2e-3)
    half_of_the_others = pytest.approx((1e-4 + 2e-3) / 2)
    assert rates.per_message_s("agreement", Sent(600 * few + none, all_of_them)) == half_of_the_others
    assert rates.per_message_s("agreement", Sent(600 * few * one, all_of_them)) == pytest.approx(1e-4), (
        "one link at a time"
    )


def test_messages_of_sleeping_ranks_wait_for_those_of_their_own_group() -> None:
    """Two groups of four tensor ranks rarely send at the same time, so their messages take as long as those of one."""
    cluster = ss.Cluster.emulated(nodes=1, per_node=8, flops="1 GFLOP/s")
    host = HostCalibration.shipped().replace(machine=HostMachine.here())
    layout = ss.Layout(data=2, tensor=4, micro_batch=4, global_batch=16)
    job = ss.Job(model="gpt-nano", data="python-source", layout=layout)
    rates = RankRates.of_this_machine(job, [Work(1.0)] * 8, host, emulated=cluster)
    sent = Sent(np.full(8, 8), np.full(8, 3))
    assert rates.idle is not None
    assert rates.per_message_s("tensor:all_reduce", sent) == pytest.approx(rates.idle.at(4), rel=1e-3)
    assert rates.per_message_s("agreement", sent) == pytest.approx(rates.idle.at(8), rel=1e-3)
    experts = ss.Job(
        model="moe-nano",
        data="python-source",
        layout=ss.Layout(data=8, expert=4, micro_batch=2, global_batch=16),
    )
    rates = RankRates.of_this_machine(experts, [Work(1.0)] * 8, host, emulated=cluster)
    groups = {axis: rates.axis_ranks[axis] for axis in ("data", "expert", "expert-data")}
    assert groups == {"data": 8, "expert": 4, "expert-data": 2}


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3"])
def test_sleep_absorbs_waits_for_a_core_and_shortens_by_what_computes_during_gathers(strategy: Any) -> None:
    host = HostCalibration.shipped().replace(machine=HostMachine.here())
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=8, batch=64)
    slow, fast, unslept = (
        ss.Cluster.emulated(nodes=8, bandwidth=bandwidth, flops=flops)
        for bandwidth, flops in (
            ("10 Mbit/s", "20 MFLOP/s"),
            ("10 Gbit/s", "20 MFLOP/s"),
            ("10 Mbit/s", "1 TFLOP/s"),
        )
    )
    found = ss.predict(job, slow, calibration=host)
    units = len(found.step.trace.units)
    cores = min(8, host.machine.cores)
    work_s = units * host.value("unit_s", ranks=cores)
    forward, backward = found.time["forward"], found.time["backward"]
    stated_s = forward["emulated processor"].value
    assert forward.value == pytest.approx(stated_s + work_s / 2)
    if strategy == "zero-2":
        assert backward.value == pytest.approx(2 * stated_s + work_s / 2)
        return
    assert backward.value == pytest.approx(2 * stated_s - work_s * 8 / cores)
    time = ss.predict(job, fast, calibration=host).time
    overlap_s = min(time["ring_all_gather"].value / 2, work_s * 8 / cores)
    assert time["backward"].value == pytest.approx(2 * stated_s - overlap_s)
    time = ss.predict(job, unslept, calibration=host).time
    assert time["backward"].value > work_s / 2, "no sleep that could be shorter"
    busy_s = work_s * 8 / cores
    little_sleep = ss.Cluster.emulated(
        nodes=8, bandwidth="10 Mbit/s", flops=20e6 * 2 * stated_s / (1.1 * busy_s)
    )
    time = ss.predict(job, little_sleep, calibration=host).time
    assert time["backward"].value == pytest.approx(busy_s + work_s / 2), "what the rank itself computes"


def test_a_calibration_without_times_of_sleeping_ranks_says_that_it_borrows_them() -> None:
    host = HostCalibration.shipped()
    older = host.replace(constants=[row for row in host.constants if row.name != "woken_message_s"])
    emulated = ss.Cluster.emulated(nodes=4, flops="1 GFLOP/s")
    whole, borrowed = (ss.predict(job_of(), emulated, calibration=each) for each in (host, older))
    assert borrowed.step_time_s == pytest.approx(whole.step_time_s)
    assert "no woken_message_s" in str(borrowed.note)
    assert "no woken_message_s" in str(borrowed)
    assert "woken_message_s" not in str(whole.note)
    no_sleep = ss.Cluster.emulated(nodes=4)
    assert "woken_message_s" not in str(ss.predict(job_of(), no_sleep, calibration=older).note)


def test_stated_times_are_nearly_certain() -> None:
    """The interval is that of the time which the calibration predicts, and 2 % of passes and transfers."""
    cluster = ss.Cluster.emulated(nodes=4, flops="1 MFLOP/s")
    found = ss.predict(job_of("ring"), cluster, calibration=HostCalibration.shipped())
    stated_s = sum(part.value for part in found.time.parts if part.name in {"forward", "backward"})
    stated_s += sum(sent.busiest.max() for sent in found.traffic.values()) / cluster.link.bandwidth
    low, high = HostCalibration.shipped().interval(found.step_time_s - stated_s)
    assert found.interval == pytest.approx((0.98 * stated_s + low, 1.02 * stated_s + high))


def test_ranks_of_a_single_emulated_node_have_the_rates_of_this_machine() -> None:
    job = job_of()
    one, two = (ss.Cluster.emulated(nodes, "1 Mbit/s", "1 s", per_node=4 // nodes) for nodes in (1, 2))
    here, on_one, on_two = (
        RankRates.of_this_machine(job, [Work(1.0)] * 4, HostCalibration.shipped(), emulated=at)
        for at in (None, one, two)
    )
    assert on_one == here
    assert on_two.link < 125_000 < here.link
    assert (on_two.latency_s, here.latency_s) == (1.0, 0.0)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_jobs_layout_spreads_it_over_as_many_devices(strategy: str) -> None:
    job = job_of(strategy, precision="bf16")
    if job.strategy.degrees(4) is None:
        with pytest.raises(ss.SpecError, match="has no corresponding layout"):
            job.layout()
        return
    layout = job.layout()
    assert layout.num_devices == 4
    assert layout.num_micro_batches == job.num_micro_batches
    assert layout.global_batch == job.batch.global_batch
    assert layout.precision == "bf16-autocast"


class TestOnGPUs:
    """Without a cluster, the rates of GPUs are unknown; those of this machine's CPUs say nothing about them."""

    @pytest.fixture(params=["cuda", "auto"])
    def job(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ss.Job:
        monkeypatch.setattr(loads, "num_gpus", lambda: 2)
        return job_of("all-reduce", world_size=2, device=request.param)

    def test_there_is_no_time_and_a_sentence_says_why(self, job: ss.Job) -> None:
        found = ss.predict(job)
        assert (found.time, found.step_time_s, found.run_time_s, found.fits) == (None, None, None, None)
        assert found.machine_bytes is None
        assert found.peak_bytes and found.sent_bytes.all()
        said = json.loads(json.dumps(found.to_dict()))
        assert (said["time"], said["step_time_s"], said["run_time_s"]) == (None, None, None)
        for text in (said["note"], repr(found), found._repr_html_().replace("&#x27;", "'")):
            assert "rates are unknown without a cluster; give a cluster" in text
        with pytest.raises(ss.SpecError, match=r"no step time.*give a cluster.*per_node=2"):
            found.time_to_train(1e9)

    def test_a_cluster_gives_the_time(self, job: ss.Job) -> None:
        found = ss.predict(job, ss.Cluster.of("h100", per_node=2))
        assert found.step_time_s is not None and found.fits

    def test_ranks_that_share_a_gpu_take_gloo(self, job: ss.Job) -> None:
        assert ss.predict(job).step.backend == "nccl"
        shared = ss.predict(job.replace(world_size=4))
        assert (shared.step.backend, shared.time) == ("gloo", None)

    def test_the_cpus_keep_their_time(self, job: ss.Job) -> None:
        found = ss.predict(job.replace(device="cpu"))
        assert found.step.backend == "gloo"
        assert "ss.calibrate()" in found.note, "rates of CPUs, though of another machine"
        assert found.step_time_s is not None and found.fits


def test_cuda_on_a_machine_without_gpus_is_for_another_machine() -> None:
    found = ss.predict(job_of("all-reduce", device="cuda"))
    assert (found.step.backend, found.time) == ("nccl", None)


def test_what_cannot_be_is_refused_with_a_way_out() -> None:
    with pytest.raises(ss.SpecError, match=r"world_size=4 does not match the 8 devices"):
        ss.predict(job_of(), ss.Cluster.of("a100-80gb"))
    with pytest.raises(ss.SpecError, match=r"layout has no effect on a job"):
        ss.predict(job_of(), CLUSTER, ss.Layout())  # type: ignore[call-overload]
    with pytest.raises(ss.SpecError, match=r"precision='fp64' is not available in layouts"):
        job_of(precision="fp64").layout()
    with pytest.raises(ss.SpecError, match="is for a GPU and has no effect on this machine"):
        ss.predict(job_of(), calibration=ss.Calibration.of("h100-80gb"))
    with pytest.raises(ss.SpecError, match="calibration takes a HostCalibration, got 'mine.json'"):
        ss.predict(job_of(), calibration="mine.json")  # type: ignore[call-overload]
    with pytest.raises(ss.SpecError, match="predict takes a Job"):
        ss.predict("ring")  # type: ignore[call-overload]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


def test_a_model_and_a_loss_of_ones_own_are_predicted_where_they_run_on_shapes() -> None:
    job = ss.Job(model=Own, data="digits", loss=nn.functional.cross_entropy)
    found = ss.predict(job)
    assert found.states is not None and found.memory is not None
    assert found.states.parameters.tolist() == [4 * 650] * 2
    looks = job.replace(loss=lambda scores, _: scores.sum() * float(scores.detach().max()))
    assert ss.predict(looks).memory is None
    assert ss.predict(looks).traffic is not None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_stages_save_what_is_in_flight(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    """Within 2 % of what ranks count, for an input that two layers save is counted for both; or a bound."""
    job = job_of(
        ss.Pipeline(schedule=schedule, split="even"), model="gpt-small", world_size=pool.world_size,
        batch=ss.Batch(2 * pool.world_size, micro_batch=1), record=ss.Record(memory_every=1), steps=1,
    )  # fmt: skip
    saved = job.strategy.activations(ss.predict(job).step)
    assert saved is not None
    for rank, events in enumerate(run_on(pool, job, tmp_path)):
        measured = max(event["activations"] for event in events if event["event"] == "memory")
        if schedule == "zb-h1":
            assert 0.98 * measured <= saved[rank] <= 2.1 * measured
        else:
            assert saved[rank] == pytest.approx(measured, rel=0.02), f"rank {rank}"


@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16-mixed", *(pytest.param(p, marks=pytest.mark.weekly) for p in ("fp64", "fp16-mixed"))],
)
@pytest.mark.parametrize("strategy", ["ring", "zero-1", "zero-3", "parameter-server", "gossip"])
def test_ranks_save_what_is_traced(pool: RankPool, tmp_path: Path, strategy: str, precision: str) -> None:
    job = job_of(
        strategy, world_size=pool.world_size, batch=24, precision=precision, record=ss.Record(memory_every=1)
    )
    saved = job.strategy.activations(ss.predict(job).step)
    assert saved is not None
    for rank, events in enumerate(run_on(pool, job, tmp_path)):
        measured = max(event["activations"] for event in events if event["event"] == "memory")
        assert saved[rank] == pytest.approx(measured, rel=0.005), f"rank {rank}"


def test_nothing_is_left_of_a_traced_model() -> None:
    before = torch.get_rng_state()
    ss.predict(job_of(seed=5))
    assert torch.equal(before, torch.get_rng_state())
