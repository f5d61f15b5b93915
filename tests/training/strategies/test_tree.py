"""Data parallel over the tree follows one process."""

from __future__ import annotations

import shardscope as ss
from conformance.runs import small_job
from conformance.strategy import StrategyConformance
from shardscope.analytic.communication import all_reduce_bytes, tree_all_reduce_bytes


def test_a_step_sends_what_the_formula_says() -> None:
    """However the gradients fall into buckets, once DistributedDataParallel has settled them: 2(W-1) of them in all."""
    run = ss.launch(small_job(strategy=ss.Tree(bucket_mb=0.05), world_size=3, batch=48, steps=4)).wait(60)
    num_params = run.events("start")[0]["num_params"]
    assert set(run.metrics()["sent_bytes"].iloc[2:]) == {all_reduce_bytes(4 * num_params, 3)}
    sent = [event["traffic"]["tree_all_reduce"]["sent_bytes"] for event in run.events("step")[-3:]]
    assert sorted(sent) == sorted(tree_all_reduce_bytes(num_params, 4, 3))


class TestTree(StrategyConformance):
    strategy = ss.Tree(
        bucket_mb=0.02, slice_mb=0.002
    )  # several buckets of several slices even for a tiny model
