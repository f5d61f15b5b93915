"""ZeRO-1 and ZeRO-2 with shards of different sizes: ranks follow one process, and hold and send what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.strategy import job as matrix_job
from conformance.strategy import oracle, relative_difference, tiny_gpt, train
from prediction.ranks_of import EVERY_STEP, hold_states, hold_traffic, run_on
from shardscope.methods.strategies.flat_shards import FlatShards
from shardscope.prediction.traced import traced
from shardscope.spec.shares import shard_sizes, shares_by_memory

SHARES = (3, 1, 2, 1)
STAGES = (ss.Zero1, ss.Zero2)
OPTIMIZERS = (ss.Optimizer("adamw", lr=1e-3), ss.Optimizer("lamb", lr=5e-3))


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@given(st.integers(0, 1000), st.lists(st.integers(1, 2**40), min_size=1, max_size=8))
def test_sizes_add_up_and_are_within_one_element_of_their_share(num_elements: int, shares: list[int]) -> None:
    sizes = shard_sizes(num_elements, shares)
    assert sum(sizes) == num_elements
    exact = [num_elements * share / sum(shares) for share in shares]
    assert all(abs(size - each) < 1 + 1e-6 for size, each in zip(sizes, exact, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("stage", STAGES)
def test_uneven_shards_follow_one_process(
    four: RankPool, tmp_path: Path, stage: type[FlatShards], optimizer: ss.Optimizer
) -> None:
    """With accumulation, clipping, and buckets so small that some have fewer elements than the shares add up to."""
    ours = matrix_job(
        strategy=stage(shards=SHARES, bucket_mb=0.002), world_size=4, batch=ss.Batch(48, micro_batch=4),
        optimizer=optimizer, clip_norm=0.5,
    )  # fmt: skip
    losses, expected = oracle(tiny_gpt, optimizer.name, "fp64", 0.5)
    results = four.run(lambda context: train(ours, context), tmp_path)
    assert [sum(row) / 4 for row in zip(*(each for each, _ in results), strict=True)] == pytest.approx(  # type: ignore[arg-type]
        losses, rel=1e-9
    )
    for _, parameters in results:
        assert relative_difference(parameters, expected) < 1e-9


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_hold_and_send_what_is_said(
    four: RankPool, tmp_path: Path, stage: type[FlatShards], optimizer: str
) -> None:
    ours = small_job(
        strategy=stage(shards=SHARES, bucket_mb=0.05), world_size=4, batch=ss.Batch(48, micro_batch=6), steps=2,
        optimizer=optimizer, record=EVERY_STEP,
    )  # fmt: skip
    trace = traced(ours).table.step
    assert trace is not None
    ranks = run_on(four, ours, tmp_path)
    assert hold_states(ours, trace, ranks) == 32
    assert hold_traffic(ours, trace, ranks) > 0
    sent = ss.predict(ours).sent_bytes
    even = ss.predict(ours.replace(strategy=stage(bucket_mb=0.05, shards=(1, 1, 1, 1)))).sent_bytes
    assert sent.sum() == even.sum()
    assert len(set(sent.tolist())) > 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_shards_ranks_and_strategies() -> None:
    alone = ss.launch(small_job(strategy="single", world_size=1, steps=6, batch=48)).wait(60)
    expected = alone.metrics()["loss"].tolist()
    stretches: list[tuple[int, int, Any]] = [
        (2, 2, ss.Zero1(shards=(2, 1))),
        (4, 3, ss.Zero2(shards=(1, 1, 2))),
        (5, 2, ss.Zero1(shards=(1, 2))),
        (6, 2, "zero-3"),
    ]
    losses: list[float] = []
    before = None
    for until, ranks, strategy in stretches:
        job = small_job(strategy=strategy, world_size=ranks, steps=6, batch=48, until=until)
        before = ss.launch(job, resume=before).wait(60)
        losses += before.metrics()["loss"].tolist()
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_shards_by_memory_are_those_of_the_memory_that_the_cluster_states(stage: type[FlatShards]) -> None:
    needs_namespaces()
    cluster = ss.Cluster.emulated(nodes=2, memory="1 MB", node_memory={0: "2 MB"})
    ours = small_job(strategy=stage(shards="memory"), steps=2, record=EVERY_STEP)
    run = ss.launch(ours, cluster).wait(60)
    held = run.memory().groupby("rank")["optimizer"].max().tolist()
    prediction = ss.predict(ours, cluster)
    assert held == prediction.kinds["optimizer"].tolist()
    gradients = prediction.step.num_elements * 4  # one bucket: whole, or in the only buffer
    free = [each - float(prediction.kinds["parameters"][0]) - gradients for each in (2e6, 1e6)]
    assert held[0] / held[1] == pytest.approx(free[0] / free[1], rel=0.01)
    assert prediction.by_rank is not None
    assert prediction.by_rank[0]["optimizer"].value == held[0]
    assert run.metrics()["loss"].tolist() == pytest.approx(
        ss.launch(small_job(strategy="zero-1", steps=2)).wait(60).metrics()["loss"].tolist(), rel=1e-5
    )


def refusals() -> list[tuple[Any, str]]:
    def job(**changes: Any) -> Any:
        return lambda: small_job(**changes)

    small = ss.Cluster.emulated(nodes=2, memory="100 kB")
    by_memory = small_job(strategy=ss.Zero1(shards="memory"))
    return [
        (job(strategy=ss.Zero1(shards=(2, 1)), world_size=3, batch=48),
         "has 2 numbers, but world_size=3; give 3 numbers, or 'memory'"),
        (lambda: ss.Zero1(shards=(2, 0)), "strategy.shards=(2, 0) is not valid; give one whole number"),
        (lambda: ss.Zero1(shards="speed"), "or 'memory'"),
        (lambda: ss.Zero3(shards=(2, 1)), "strategy='zero-3', whose parameters PyTorch's fully_shard cuts"),
        (job(strategy=ss.Zero2(shards=(2, 1, 2, 1), replicas=2), world_size=4), "cannot be combined with replicas=2"),
        (job(strategy=ss.Zero2(shards=(2, 1), offload=True)), "needs the equal shards of FSDP2"),
        (job(strategy=ss.Zero2(bucket_mb=1)), "strategy.bucket_mb=1 has no effect without shards"),
        (job(strategy=ss.Zero1(shards=(2, 1), collectives="backend")), "use collectives='ring'"),
        (job(strategy=ss.Zero1(shards=(2, 1)), compression="topk"), "packs equal shards"),
        (lambda: small_job(strategy=ss.Zero1(shards=(2, 1))).layout(), "equal ZeRO shards"),
        (lambda: ss.predict(by_memory, small).states, "leaves no memory for a shard on rank 0"),
        (lambda: ss.predict(by_memory, ss.Cluster.emulated(nodes=2)).states, "does not state the memory of its ranks"),
    ]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), refusals())
def test_what_cannot_be_is_refused_in_one_sentence(make: Any, told: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        make()
    assert told in str(refused.value)


def test_shares_by_memory_take_what_all_ranks_hold_off() -> None:
    assert shares_by_memory([5e9, 5e9, 3e9], 1e9) == (4_000_000_000, 4_000_000_000, 2_000_000_000)
