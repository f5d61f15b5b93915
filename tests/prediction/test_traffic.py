"""What strategies say that ranks send and hold in a step, against what real ranks have counted, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_compared, hold_states, hold_traffic, run_on
from shardscope.prediction.traced import traced
from shardscope.spec.registry import names

DEDICATED = ss.ParameterServer(servers=2, dedicated=True)
STRATEGIES = [
    ss.AllReduce(bucket_mb=0.05),
    ss.Ring(bucket_mb=0.05, slice_mb=0.01),
    ss.Ring(directions=2, bucket_mb=0.05, slice_mb=0.01),
    ss.Tree(slice_mb=0.01),
    ss.Hierarchical(slice_mb=0.01),
    ss.Gossip(mix_every=2, measure_every=3, slice_mb=0.01),
    ss.Zero1(bucket_mb=0.05),
    ss.Zero1(collectives="backend"),
    ss.Zero2(),
    ss.Zero2(collectives="backend"),
    ss.Zero2(replicas=2),
    ss.Zero2(replicas=2, collectives="backend"),
    ss.Zero3(),
    ss.Zero3(replicas=2),
    ss.ParameterServer(),
    DEDICATED,
    ss.ParameterServer(mode="async", servers=2),
    ss.Pipeline(split="even"),
    ss.Pipeline(schedule="gpipe", split="memory"),
]
MODELS = {"cnn": "digits", "gpt-nano": "python-source"}
"""With the data that each trains on."""
OPTIMIZERS = [
    ss.Optimizer("sgd"),
    ss.Optimizer("adamw"),
    ss.Optimizer("lars", exclude="1d"),
    ss.Optimizer("lamb", variant="apex"),
]
GOES_WITH = {"onebit-adam": "adamw", "onebit-lamb": "lamb", "dgc": ss.Optimizer("sgd", momentum=0.0)}
"""Of compressions that need an optimizer."""


def hold_against(pool: RankPool, job: ss.Job, folder: Path) -> int:
    """Assert that each rank sends and holds what is predicted in each step; returns how many collectives were exact."""
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    hold_states(job, trace, events)
    hold_compared(job, folder)
    return hold_traffic(job, trace, events)


def job_of(world_size: int, model: str, **fields: Any) -> ss.Job:
    fields = {"batch": 48, "steps": 3, "record": EVERY_STEP, **fields}
    return ss.Job(model=model, data=MODELS[model], world_size=world_size, **fields)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.label} {s.changed}")
def test_each_rank_sends_and_holds_what_its_strategy_says(
    pool: RankPool, tmp_path: Path, strategy: ss.Strategy, model: str
) -> None:
    if getattr(strategy, "replicas", 1) > 1 and pool.world_size != 4:
        pytest.skip("two replicas of two shards are four ranks")
    if strategy == DEDICATED and pool.world_size == 2:
        pytest.skip("two servers leave no worker")
    job = job_of(pool.world_size, model, strategy=strategy, optimizer="lamb", clip_norm=1.0)
    assert hold_against(pool, job, tmp_path) > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("strategy", ["ring", "zero-1", "zero-3", ss.Pipeline(split="even")], ids=str)
def test_norms_cost_what_the_optimizer_says(
    pool: RankPool, tmp_path: Path, strategy: Any, optimizer: ss.Optimizer
) -> None:
    micro_batch = 48 // (pool.world_size if not isinstance(strategy, ss.Pipeline) else 1) // 4
    job = job_of(
        pool.world_size, "cnn", strategy=strategy, optimizer=optimizer, precision="fp64",
        batch=ss.Batch(48, micro_batch=micro_batch),
    )  # fmt: skip
    assert hold_against(pool, job, tmp_path) > 0


@pytest.mark.parametrize("compression", names(ss.Compression))
@pytest.mark.parametrize(
    "strategy", ["all-reduce", "ring", "tree", "gossip", "zero-1", "zero-2", "parameter-server"]
)
def test_each_rank_sends_and_holds_what_its_compression_says(
    pool: RankPool, tmp_path: Path, strategy: str, compression: str
) -> None:
    fields: dict[str, Any] = {"strategy": strategy, "optimizer": GOES_WITH.get(compression, "sgd")}
    if compression in ("onebit-adam", "onebit-lamb", "local-sgd"):
        fields["steps"] = 8  # a warm-up of five steps, or a period of eight
    try:
        job = job_of(pool.world_size, "cnn", compression=compression, **fields)
    except ss.SpecError:
        pytest.skip("they do not go together")
    assert hold_against(pool, job, tmp_path) > 0 or compression == "local-sgd"


@pytest.mark.slow
def test_plans_that_move_stay_within_their_bounds(pool: RankPool, tmp_path: Path) -> None:
    for compression in (
        ss.Compression("adaptive-bits", update_every=2), ss.Compression("adaptive-rank", update_every=3),
    ):  # fmt: skip
        job = job_of(pool.world_size, "gpt-nano", strategy="ring", compression=compression, steps=7)
        folder = tmp_path / compression.name
        folder.mkdir()
        assert hold_against(pool, job, folder) > 0
