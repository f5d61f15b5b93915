"""Jobs that cannot be: each is refused in one clear line, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from conformance.runs import small_job

BATCH = ss.Batch(48, micro_batch=4)
OF_ALL_STRATEGIES: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "rign"}, "strategy='rign' is not known; did you mean 'ring'"),
    ({"model": "mpl"}, "did you mean 'mlp'"),
    ({"data": "digit"}, "did you mean 'digits'"),
    ({"optimizer": "lam"}, "did you mean 'lamb'"),
    ({"precision": "fp23"}, "did you mean 'fp32'"),
    ({"recompute": "ful"}, "did you mean 'full'"),
    ({"loss": "cross_entropy"}, "did you mean 'cross-entropy'"),
    ({"batchsize": 3}, "did you mean 'batch'"),
    ({"world_size": 3}, "batch.global_batch=64 is not divisible by world_size=3; use 63 or 66"),
    (
        {"batch": ss.Batch(64, micro_batch=5)},
        "micro_batch=5 does not divide the per-rank batch 32; use one of 1, 2, 4",
    ),
    (
        {"strategy": ss.ParameterServer(dedicated=True), "world_size": 4},
        "global_batch=64 is not divisible by the 3 workers of world_size=4; use 63 or 66",
    ),
    ({"strategy": None}, "strategy=None is not a Strategy; give a name"),
    (
        {"strategy": {"name": "parameter-server", "staleness": 4}},
        "staleness=4 has no effect with mode='sync'; leave it out, or use mode='ssp'",
    ),
    ({"world_size": 1}, "needs at least 2 ranks, got world_size=1"),
    ({"strategy": "single", "world_size": 4}, "runs on 1 rank, got world_size=4"),
    ({"strategy": "all-reduce:2"}, "has no variants"),
    ({"model": "gpt-nano"}, "gpt-nano"),
    ({"steps": 0}, "steps=0"),
    ({"lr_schedule": ss.LRSchedule("cosine", warmup_steps=50)}, "warmup_steps=50 is more than steps=10"),
]
OF_ZERO: list[tuple[dict[str, Any], str]] = [
    ({"strategy": ss.Zero3(replicas=3)}, "strategy.replicas=3 does not divide world_size=4"),
    ({"strategy": ss.Zero2(replicas=4)}, "groups of at least 2 ranks; use 1 or 2"),
    ({"strategy": "zero-3", "world_size": 1}, "needs at least 2 ranks"),
    ({"strategy": "zero-3:rings"}, "collectives='rings'"),
    ({"strategy": "zero-4"}, "did you mean 'zero-"),
]
OF_SERVERS_AND_GOSSIP: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "parameter-server:asinc"}, "mode='asinc' is not known; did you mean 'async'"),
    (
        {"strategy": {"name": "parameter-server", "servers": 3}},
        "strategy.servers=3 is too many for world_size=2; use at most 2",
    ),
    (
        {"strategy": {"name": "parameter-server", "servers": 2, "dedicated": True}},
        "strategy.servers=2 is too many for world_size=2, since one rank must be a worker; use at most 1",
    ),
    ({"strategy": {"name": "parameter-server", "staleness": -1}}, "staleness=-1"),
    (
        {
            "strategy": {"name": "parameter-server", "servers": 2, "mode": "async"},
            "optimizer": ss.Optimizer("lamb", max_grad_norm=1.0),
        },
        "optimizer.max_grad_norm=1.0 needs the whole gradient",
    ),
    ({"strategy": "parameter-server", "world_size": 1}, "needs at least 2 ranks"),
    ({"strategy": "gossip:0"}, "mix_every=0"),
    ({"strategy": "gossip", "world_size": 1}, "needs at least 2 ranks"),
]
OF_PIPELINES: list[tuple[dict[str, Any], str]] = [
    (
        {"batch": ss.Batch(48, micro_batch=24)},
        "batch.micro_batch=24 makes 2 micro-batches per pass, but the 1f1b schedule on 3 ranks needs",
    ),
    ({"batch": ss.Batch(48, micro_batch=24)}, "use batch.micro_batch=16 (3 micro-batches)"),
    ({"strategy": "pipeline:zb"}, "zero-bubble"),
    (
        {"strategy": "pipeline:dualpipev", "batch": ss.Batch(48, micro_batch=12), "model": "resnet"},
        "needs at least 6",
    ),
    (
        {"strategy": "pipeline:interleaved", "model": "resnet", "batch": ss.Batch(70, micro_batch=10)},
        "in rounds of equal size",
    ),
    (
        {"strategy": ss.Pipeline(microbatches=5)},
        "microbatches=5 does not divide the 12 micro-batches of a step",
    ),
    ({"strategy": ss.Pipeline(microbatches=2)}, "microbatches=2 makes 2 micro-batches per pass"),
    ({"world_size": 5}, "the model has 4 layers to split, fewer than the pipeline's 5 stages"),
    ({"strategy": "pipeline:zbv"}, "the model has 4 layers to split, fewer than the pipeline's 6 stages"),
    (
        {"strategy": ss.Pipeline(split=(2, 2))},
        "has 2 numbers, but world_size=3 with virtual_stages=1 makes 3 stages",
    ),
    ({"strategy": ss.Pipeline(split=(2, 0, 2))}, "give 3 numbers of at least 1"),
    (
        {"strategy": ss.Pipeline(split=(2, 2, 2))},
        "adds up to 6 layers, but model='mlp' has 4 layers; make",
    ),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *OF_ALL_STRATEGIES,
        *(({"world_size": 4, **fields}, message) for fields, message in OF_ZERO),
        *OF_SERVERS_AND_GOSSIP,
        *(
            ({"strategy": "pipeline", "world_size": 3, "batch": BATCH, **fields}, message)
            for fields, message in OF_PIPELINES
        ),
    ],
)
def test_it_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        small_job(**fields)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
