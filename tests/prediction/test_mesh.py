"""What ranks of a mesh send on each axis and hold, against what real ranks have counted, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_compared, hold_states, hold_traffic, run_on
from shardscope.analytic.communication.traffic import sent_bytes
from shardscope.methods.strategies.mesh import Mesh
from shardscope.prediction.traced import traced
from shardscope.runlog.axes import axis_of
from shardscope.spec.models import MODELS, GPTConfig

STRATEGIES = [
    Mesh(data=ss.Ring(bucket_mb=0.05, slice_mb=0.01), tensor=2),
    Mesh(data=ss.AllReduce(bucket_mb=0.05), tensor=2),
    Mesh(data=ss.Tree(slice_mb=0.01), tensor=2),
    Mesh(data=ss.Hierarchical(slice_mb=0.01), tensor=2),
    Mesh(data=ss.Zero1(bucket_mb=0.05), tensor=2),
    Mesh(data=ss.Zero1(collectives="backend"), tensor=2),
    Mesh(data=ss.Zero2(), tensor=2),
    Mesh(data=ss.Zero3(), tensor=2),
    Mesh(data=ss.Zero3(collectives="backend"), tensor=2),
    Mesh(tensor=4),
    Mesh(tensor=2, sequence_parallel=True),
    Mesh(data=ss.Zero3(), tensor=2, sequence_parallel=True),
]


def staged(data: Any, schedule: str = "1f1b", *, virtual_stages: int | None = None, tensor: int = 1) -> Mesh:
    stages = ss.Pipeline(schedule=schedule, virtual_stages=virtual_stages, split="even")
    return Mesh(data=data, tensor=tensor, pipeline=2, stages=stages)


STAGED = [
    (staged(ss.Zero1(bucket_mb=0.05), "interleaved", virtual_stages=2), "none"),
    (staged("ring", tensor=2), "none"),
    (staged(ss.Ring(bucket_mb=0.05, slice_mb=0.01)), "selective"),
    (staged(ss.AllReduce(bucket_mb=0.05)), "full"),
    (staged(ss.Tree(slice_mb=0.01), "gpipe"), "selective"),
    (staged(ss.Hierarchical(slice_mb=0.01), "gpipe"), "full"),
    (staged("zero-2"), "none"),
    (staged("zero-3"), "none"),
    (staged("zero-3", "interleaved", virtual_stages=2), "full"),
    (staged("zero-3", "zb-h1"), "full"),
    (staged("zero-3", "v-half"), "none"),
    (staged("zero-2", "zbv"), "selective"),
    (staged("ring", "zb-h1", tensor=2), "full"),
]
"""Meshes with a pipeline, each with a recomputation mode."""
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": ss.Optimizer("lars", exclude="1d")},
    {"recompute": "full", "optimizer": "sgd"},
    {"recompute": "selective", "precision": "fp64"},
    {"precision": "fp16", "clip_norm": 1.0},
]


def named(value: Mesh | str) -> str:
    return value if isinstance(value, str) else f"{value.label}-{value.stages.label}"


class Perceptron(nn.Module):
    """A model of the user's own, with a plan, a tensor that is whole, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 10)
        self.register_buffer("scale", torch.full((64,), 0.5))

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "columns", "down": "rows"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1) * self.scale
        return self.head(x + self.down(self.up(x).relu()))  # type: ignore[no-any-return]


REPLICAS = [
    Mesh(data=ss.Zero3(replicas=2), tensor=2),
    Mesh(data=ss.Zero2(replicas=2, collectives="backend"), tensor=2, sequence_parallel=True),
]
"""Groups of ranks that share their states, on a data axis of 4 of 8 ranks."""


def job_of(world_size: int, strategy: Mesh, **fields: Any) -> ss.Job:
    fields = {"steps": 3, "record": EVERY_STEP, "batch": ss.Batch(16, micro_batch=4), **fields}
    fields = {"model": "gpt-nano", "data": "python-source", **fields}
    return ss.Job(strategy=strategy, world_size=world_size, **fields)


def hold_against(pool: RankPool, job: ss.Job, folder: Path) -> None:
    """Assert that each rank sends and holds what is predicted in each step, and that both axes have been compared."""
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    hold_states(job, trace, events)
    assert hold_traffic(job, trace, events) > 0
    found = hold_compared(job, folder)
    assert isinstance(job.strategy, Mesh)
    axes = {axis for axis, size in job.strategy.shape(job.world_size).items() if size > 1}
    assert {axis_of(row.term) for row in found.rows if row.group == "bytes"} - {None} == axes
    for predicted, measured in found["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.label)
def test_each_rank_sends_and_holds_what_its_axes_say(pool: RankPool, tmp_path: Path, strategy: Mesh) -> None:
    hold_against(pool, job_of(4, strategy, optimizer="lamb", clip_norm=1.0), tmp_path)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "recompute"), STAGED[:2], ids=named)
def test_each_rank_of_a_pipeline_sends_and_holds_what_its_axes_say(
    pool: RankPool, tmp_path: Path, strategy: Mesh, recompute: str
) -> None:
    hold_against(pool, job_of(4, strategy, optimizer="lamb", clip_norm=1.0, recompute=recompute), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "recompute"), STAGED[2:], ids=named)
def test_other_pipelines_send_and_hold_what_their_axes_say(
    pool: RankPool, tmp_path: Path, strategy: Mesh, recompute: str
) -> None:
    hold_against(pool, job_of(4, strategy, clip_norm=1.0, optimizer="lamb", recompute=recompute), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_pipeline_without_other_axes_costs_what_it_says(pool: RankPool, tmp_path: Path) -> None:
    hold_against(pool, job_of(2, staged("ring"), clip_norm=1.0), tmp_path)


@pytest.mark.weekly
@pytest.mark.parametrize("data", ["zero-2", "zero-3"])
def test_eight_ranks_of_a_pipeline_hold_what_their_axes_say(
    eight: RankPool, tmp_path: Path, data: str
) -> None:
    job = job_of(8, staged(data, "gpipe", tensor=2), clip_norm=1.0, batch=ss.Batch(16, micro_batch=2))
    hold_against(eight, job, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("data", ["ring", "zero-1", "zero-3"])
def test_settings_cost_what_they_say(
    pool: RankPool, tmp_path: Path, data: str, settings: dict[str, Any]
) -> None:
    hold_against(pool, job_of(4, Mesh(data=data, tensor=2), **settings), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd", "bf16"])
@pytest.mark.parametrize("data", ["ring", "all-reduce"])
def test_compressed_gradients_cost_what_they_say(
    pool: RankPool, tmp_path: Path, data: str, compression: str
) -> None:
    strategy = Mesh(data=ss.Strategy(data, bucket_mb=0.05), tensor=2)
    hold_against(pool, job_of(4, strategy, compression=compression), tmp_path)


@pytest.mark.sampled
@pytest.mark.ranks(4)
@pytest.mark.parametrize("compression", ["int8", "topk", "powersgd", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_compressed_gradients_of_stages_cost_what_they_say(
    pool: RankPool, tmp_path: Path, schedule: str, compression: str
) -> None:
    data = ss.AllReduce(bucket_mb=0.05) if compression == "bf16" else ss.Ring(bucket_mb=0.05)
    hold_against(pool, job_of(4, staged(data, schedule), compression=compression), tmp_path)


def test_packing_takes_the_time_of_the_stage_with_most_parameters() -> None:
    def wide_at_first() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 1024), nn.Linear(1024, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        )

    stages = ss.Pipeline(split=(3, 2))
    fields: dict[str, Any] = {"model": wide_at_first, "data": "digits", "compression": "int8"}
    whole = ss.predict(job_of(2, ss.Ring(), **fields))  # type: ignore[arg-type]
    staged = ss.predict(job_of(4, Mesh(data="ring", pipeline=2, stages=stages), **fields))
    assert "The peak memory leaves out the copies" in " ".join(staged.assumptions)
    first, every = 64 * 1024 + 1024 + 1024 * 8 + 8, sum(p.numel() for p in wide_at_first().parameters())
    codecs = [
        term for each in (staged, whole) if each.time for term in each.time.parts if term.name == "codec"
    ]
    moved = [term.value * term.inputs["bandwidth"] for term in codecs]
    assert moved[0] / moved[1] == pytest.approx(first / every, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", REPLICAS, ids=lambda s: s.label)
def test_replicas_of_shared_states_cost_what_they_say(
    eight: RankPool, tmp_path: Path, strategy: Mesh
) -> None:
    hold_against(eight, job_of(8, strategy, optimizer="lamb", clip_norm=1.0), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("data", ["ring", "zero-1", "zero-3"])
def test_parts_of_sequences_cost_what_they_say(
    pool: RankPool, tmp_path: Path, data: str, settings: dict[str, Any]
) -> None:
    hold_against(pool, job_of(4, Mesh(data=data, tensor=2, sequence_parallel=True), **settings), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("data", ["ring", "zero-2"])
def test_a_model_of_ones_own_is_predicted_as_exactly(pool: RankPool, tmp_path: Path, data: str) -> None:
    strategy = Mesh(data=data if pool.world_size == 4 else "ring", tensor=2)
    hold_against(pool, job_of(pool.world_size, strategy, model=Perceptron, data="digits", batch=48), tmp_path)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_transformer_sums_four_activations_a_block(tensor: int) -> None:
    """Shoeybi et al. 2019: two sums in each block's forward pass, and two in its backward pass."""
    job, config = job_of(2 * tensor, Mesh(tensor=tensor)), MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    activation = job.batch.micro_batch * config.seq * config.hidden * 4  # type: ignore[operator]
    sums = job.num_micro_batches * config.layers * 4
    traffic = ss.predict(job).traffic
    assert traffic is not None
    each = sums * 2 * (tensor - 1) * activation // tensor
    assert traffic["tensor:all_reduce"].bytes.tolist() == [each] * 2 * tensor


def test_parts_of_sequences_take_less_memory_for_activations() -> None:
    """Korthikanti et al. 2022, table 2: norms, and the inputs of divided layers, are divided too."""

    def activations(sequence_parallel: bool) -> float:
        found = traced(job_of(4, Mesh(tensor=2, sequence_parallel=sequence_parallel))).table.step
        assert found is not None
        return found.saved_bytes["none"] - found.loss_bytes

    config = MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    each = config.seq * config.hidden * 4
    saved = activations(False) - activations(True)
    per_block = (
        4 / 2 * each
    )  # the inputs of both norms, which are the residual stream, and of both layers of columns
    assert saved == pytest.approx(config.layers * per_block, rel=0.1)


def test_a_part_of_a_model_has_its_own_trace_and_the_whole_models_name() -> None:
    job = job_of(4, Mesh(data="zero-1", tensor=2))
    found, whole = traced(job), traced(job.replace(strategy="ring"))
    assert found.model.num_params == whole.table.num_params
    assert found.model.as_transformer == whole.table.as_transformer
    assert whole.whole is None
    assert 0.5 < found.table.num_params / whole.table.num_params < 0.6
    assert 0.5 < found.table.flops / whole.table.flops < 0.6  # the head is whole
    assert ss.predict(job).mfu is not None


@pytest.mark.parametrize("data", ["ring", "tree", "zero-3"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_simulated_step_sends_what_is_predicted(data: str, pipeline: int) -> None:
    schedule = "zbv" if data == "zero-3" else "1f1b"  # gathers for weights; one rank shares its embedding
    strategy = Mesh(data=data, tensor=2) if pipeline == 1 else staged(data, schedule, tensor=2)
    job = job_of(4 * pipeline, strategy, clip_norm=1.0, batch=ss.Batch(16, micro_batch=2))
    predicted = ss.predict(job)
    step = ss.simulate.step_events(job)  # refuses a plan whose bytes are not those of the prediction
    assert predicted.traffic is not None
    assert step.sent_bytes == sent_bytes(predicted.traffic).tolist()
    assert predicted.step_time_s == pytest.approx(ss.simulate(job).step_time_s, rel=0.1 * pipeline)


@pytest.mark.parametrize(("axis", "collective"), [("tensor", "all_reduce"), ("context", "all_gather")])
def test_only_messages_between_nodes_take_their_slow_links(axis: str, collective: str) -> None:
    cluster = ss.Cluster.emulated(2, per_node=2, bandwidth="10 Mbit/s", flops="100 MFLOP/s")
    inside, across = (ss.predict(job_of(4, Mesh(**{axis: size})), cluster).time for size in (2, 4))
    assert inside is not None
    assert across is not None
    fast, slow = (
        next(term.value for term in time.walk() if term.name == f"{axis}:{collective}")
        for time in (inside, across)
    )
    assert slow > 20 * fast


def test_each_stage_sums_the_activations_of_its_own_layers() -> None:
    """Embedding and head have no divided layer, and the ranks of a stage send nothing for other stages' layers."""
    stages = ss.Pipeline(split=(2, 4))
    job = job_of(8, Mesh(tensor=2, pipeline=2, stages=stages), batch=ss.Batch(16, micro_batch=2))
    found = ss.predict(job)
    config = MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    block = 4 * job.batch.micro_batch * config.seq * config.hidden * 4  # type: ignore[operator]
    assert found.traffic is not None
    each = job.num_micro_batches * block
    assert found.traffic["tensor:all_reduce"].bytes.tolist() == [each] * 4 + [3 * each] * 4
    assert found.states is not None
    assert (found.states.parameters[:4] < found.states.parameters[4:]).all()


def test_a_simulated_pipeline_of_several_axes_takes_as_long_as_predicted() -> None:
    cluster = ss.Cluster.emulated(4, per_node=2, bandwidth="10 Mbit/s", flops="100 MFLOP/s")
    job = job_of(8, staged("ring", tensor=2), batch=ss.Batch(16, micro_batch=2))
    found = ss.predict(job, cluster)
    step = ss.simulate.predicted(found)
    assert step.step_time_s == pytest.approx(found.step_time_s, rel=0.05)
    assert found.time is not None
    named = {term.name: term.value for term in found.time.walk()}
    assert named["data:ring_all_reduce"] > 5 * named["tensor:all_reduce"] > 0  # inside a node


def test_replicas_that_share_a_link_stay_in_step_because_they_share_it_evenly() -> None:
    cluster = ss.Cluster.emulated(2, per_node=4, bandwidth="10 Mbit/s", flops="100 MFLOP/s")
    job = job_of(8, staged("ring", "gpipe", tensor=2), batch=ss.Batch(16, micro_batch=2))
    found = ss.predict(job, cluster)
    assert ss.simulate.predicted(found).step_time_s == pytest.approx(found.step_time_s, rel=0.05)


def test_a_cluster_predicts_a_mesh_as_its_layout() -> None:
    layout = ss.Layout(data=2, tensor=4, zero=1, global_batch=16, micro_batch=4, precision="bf16-autocast")
    cluster = ss.Cluster.of("h100", per_node=8)
    job = ss.Job(model="gpt-124m", data="python-source", layout=layout)
    found = ss.predict(job, cluster)
    assert found.as_layout is not None
    assert found.as_layout[1] == job.layout()
    assert found.step_time_s == ss.predict("gpt2", cluster, job.layout(), software="fsdp2").step_time_s
    assert found.peak_bytes is not None
