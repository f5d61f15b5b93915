"""What context ranks send and hold, against what real ranks have counted, to the byte; and what a cluster predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_compared, hold_states, hold_traffic, run_on
from shardscope.methods.strategies.mesh import Mesh
from shardscope.prediction.traced import traced
from shardscope.runlog.axes import axis_of
from shardscope.spec.models import MODELS, GPTConfig
from training.strategies.test_context_axis import long_gpt

COMMS = ["all-gather", "ring", "ulysses"]


def job_of(world_size: int, strategy: ss.Strategy, **fields: Any) -> ss.Job:
    fields = {
        "model": "gpt-nano", "steps": 3, "record": EVERY_STEP, "batch": ss.Batch(16, micro_batch=4), **fields,
    }  # fmt: skip
    return ss.Job(data="python-source", strategy=strategy, world_size=world_size, **fields)


def hold_against(pool: RankPool, job: ss.Job, folder: Path) -> None:
    """Assert that each rank sends and holds what is predicted in each step, and that the context axis is compared."""
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    hold_states(job, trace, events)
    assert hold_traffic(job, trace, events) > 0
    found = hold_compared(job, folder)
    assert isinstance(job.strategy, Mesh)
    axes = {"data", "context", *(["pipeline"] if job.strategy.pipeline > 1 else [])}
    assert {axis_of(row.term) for row in found.rows if row.group == "bytes"} >= axes
    schedule = getattr(job.strategy.stages, "schedule", None)
    is_bound = job.strategy.pipeline > 1 and (schedule.splits_backward or job.recompute != "none")
    for predicted, measured in found["memory", "activations"].by_rank:
        if is_bound:
            assert measured <= predicted * 1.01
        else:
            assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("comm", COMMS)
def test_each_rank_sends_and_holds_what_its_axes_say(pool: RankPool, tmp_path: Path, comm: str) -> None:
    data = ss.Ring(bucket_mb=0.05, slice_mb=0.01)
    strategy = Mesh(data=data, context=2, context_comm=comm)
    hold_against(pool, job_of(pool.world_size, strategy, optimizer="lamb", clip_norm=1.0), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ({"data": ss.Zero1(bucket_mb=0.05)}, {"recompute": "full", "optimizer": "sgd"}),
        ({"data": ss.Zero2()}, {"precision": "bf16-mixed"}),
        ({"data": ss.Zero3()}, {"recompute": "selective", "precision": "fp64"}),
        ({"data": "ring", "tensor": 2}, {"clip_norm": 1.0}),
    ],
    ids=["zero-1", "zero-2", "zero-3", "tensor"],
)
def test_settings_cost_what_they_say(
    pool: RankPool, tmp_path: Path, comm: str, strategy: dict[str, Any], fields: dict[str, Any]
) -> None:
    mesh = Mesh(context=2, context_comm=comm, **strategy)
    hold_against(pool, job_of(4, mesh, **fields), tmp_path)


def staged(comm: str, schedule: str = "1f1b", virtual_stages: int = 1, **settings: Any) -> Mesh:
    stages = ss.Pipeline(schedule=schedule, virtual_stages=virtual_stages, split="even")
    return Mesh(**{"context": 2, "context_comm": comm, "pipeline": 2, "stages": stages, **settings})


@pytest.mark.ranks(4)
def test_each_rank_of_a_pipeline_sends_and_holds_what_its_axes_say(pool: RankPool, tmp_path: Path) -> None:
    hold_against(pool, job_of(4, staged("ring"), optimizer="lamb", clip_norm=1.0), tmp_path)


STAGED: list[tuple[Mesh, dict[str, Any]]] = [
    (staged("all-gather", data=ss.Ring(bucket_mb=0.05)), {"recompute": "full"}),
    (staged("ulysses", data=ss.Zero1(bucket_mb=0.05)), {"precision": "bf16-mixed"}),
    (staged("ring", "interleaved", 2), {"recompute": "selective", "precision": "fp64"}),
    (staged("ulysses", "gpipe"), {}),
    (staged("all-gather", "zb-h1"), {}),
    (staged("ring", data=ss.Zero3()), {}),
    (staged("all-gather", data=ss.Zero2()), {"recompute": "full"}),
]


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "fields"), STAGED, ids=str)
def test_other_pipelines_send_and_hold_what_their_axes_say(
    pool: RankPool, tmp_path: Path, strategy: Mesh, fields: dict[str, Any]
) -> None:
    _hold_staged(pool, job_of(4, strategy, clip_norm=1.0, optimizer="lamb", **fields), tmp_path)


@pytest.mark.weekly
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": ss.Zero1(bucket_mb=0.05)},
        {"data": ss.Zero3()},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"context": 4},
    ],
    ids=str,
)
def test_three_axes_send_and_hold_what_they_say(
    eight: RankPool, tmp_path: Path, comm: str, settings: dict[str, Any]
) -> None:
    _hold_staged(eight, job_of(8, staged(comm, **settings), clip_norm=1.0, optimizer="lamb"), tmp_path)


def _hold_staged(pool: RankPool, job: ss.Job, folder: Path) -> None:
    assert isinstance(job.strategy, Mesh)
    if not job.strategy.data.exchanges_in_passes:
        hold_against(pool, job, folder)
        return
    trace = traced(job).table.step
    assert trace is not None
    assert hold_traffic(job, trace, run_on(pool, job, folder)) > 0


@pytest.mark.parametrize("comm", COMMS)
def test_stages_send_each_other_parts_of_sequences(comm: str) -> None:
    """The bytes between two stages fall with the context degree, and each rank calls its own layers' collectives."""
    fields = {"batch": ss.Batch(16, micro_batch=2)}
    whole = ss.predict(job_of(4, staged(comm, context=1), **fields)).traffic
    parts = ss.predict(job_of(8, staged(comm), **fields)).traffic
    alone = ss.predict(job_of(4, Mesh(context=2, context_comm=comm), **fields)).traffic
    assert whole is not None
    assert parts is not None
    assert alone is not None
    sends = next(name for name in whole if name.startswith("pipeline:") and "send" in name)
    assert parts[sends].bytes.tolist() == [number / 2 for number in whole[sends].bytes for _ in range(2)]
    for name in alone:
        if axis_of(name) == "context":  # both stages have half of the blocks
            assert parts[name].bytes.tolist() == [number / 2 for number in alone[name].bytes] * 2


@pytest.mark.parametrize("context", [2, 4])
def test_attention_sends_what_the_papers_say(context: int) -> None:
    """Bytes of a rank in one pass through one block, from the size of keys and values."""
    config = MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    for comm, forward, backward in [
        ("all-gather", 1, 3),
        ("ring", 1, 1 + context / (context - 1)),
        ("ulysses", 2, 2),
    ]:
        job = job_of(context, Mesh(context=context, context_comm=comm))
        traffic = ss.predict(job).traffic
        assert traffic is not None
        sent = sum(found.bytes for name, found in traffic.items() if axis_of(name) == "context")
        values = 2 * job.batch.micro_batch * config.seq * config.hidden * 4  # type: ignore[operator]
        share = (context - 1) / context if comm != "ulysses" else (context - 1) / context**2
        expected = job.num_micro_batches * config.layers * (forward + backward) * share * values
        assert np.asarray(sent).tolist() == pytest.approx([expected] * context)


def test_activations_fall_with_the_number_of_ranks() -> None:
    """Ulysses keeps the output of attention twice, by heads and by tokens."""
    config = MODELS["gpt-nano"]
    assert isinstance(config, GPTConfig)
    whole = traced(job_of(4, ss.Strategy("ring"))).table.step
    assert whole is not None
    for comm in COMMS:
        part = traced(job_of(4, Mesh(context=4, context_comm=comm))).table.step
        assert part is not None
        copies = config.layers * config.seq * config.hidden * 4 if comm == "ulysses" else 0
        assert part.saved_bytes["none"] == pytest.approx((whole.saved_bytes["none"] + copies) / 4, rel=1e-4)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("comm", COMMS)
def test_memory_of_long_sequences_falls_as_predicted(pool: RankPool, tmp_path: Path, comm: str) -> None:
    """Each rank has one sequence of 4,096 tokens at a time, or a half or a quarter of one."""
    saved: dict[int, float] = {}
    for context in (1, 2, 4):
        folder = tmp_path / str(context)
        folder.mkdir()
        strategy = Mesh(data="ring", context=context, context_comm=comm)
        job = job_of(4, strategy, model=long_gpt, batch=ss.Batch(4, micro_batch=1))
        run_on(pool, job, folder)
        found = hold_compared(job, folder)
        for kind in ("activations", "peak"):
            for predicted, measured in found["memory", kind].by_rank:
                assert measured == pytest.approx(predicted, rel=0.01), kind
        saved[context] = max(measured for _, measured in found["memory", "activations"].by_rank)
    of_attention = 2 * 4096 * 16 * 4  # layers, tokens, hidden: Ulysses keeps them by heads and by tokens
    copies = of_attention if comm == "ulysses" else 0
    for context in (2, 4):
        assert saved[context] == pytest.approx((saved[1] + copies) / context, rel=0.01)


def test_a_simulated_step_sends_what_is_predicted() -> None:
    for comm in COMMS:
        job = job_of(4, Mesh(context=2, context_comm=comm))
        predicted = ss.predict(job)
        assert predicted.step_time_s == pytest.approx(ss.simulate(job).step_time_s, rel=0.1)


def test_a_cluster_predicts_a_job_with_context_as_its_layout() -> None:
    fields = {"global_batch": 16, "micro_batch": 4, "precision": "bf16-autocast"}
    layout = ss.Layout(data=2, context=2, tensor=2, zero=1, **fields)
    cluster = ss.Cluster.of("h100", per_node=8)
    job = ss.Job(model="gpt-124m", data="python-source", layout=layout)
    found = ss.predict(job, cluster)
    assert found.as_layout is not None
    assert found.as_layout[1] == job.layout()
    assert {name: getattr(job.layout(), name) for name in layout.model_fields_set} == {
        name: getattr(layout, name) for name in layout.model_fields_set
    }
    assert found.step_time_s == ss.predict("gpt2", cluster, job.layout(), software="fsdp2").step_time_s
