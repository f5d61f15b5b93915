"""Data parallel over rings in two levels follows one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardscope as ss
from conformance.ports import free_port
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.strategy import StrategyConformance
from shardscope.analytic.communication import all_reduce_bytes
from shardscope.training.context import RankContext
from shardscope.training.strategies import build_strategy


class TestHierarchical(StrategyConformance):
    strategy = ss.Hierarchical(bucket_mb=0.02)  # several buckets even for a tiny model


def test_a_step_sends_what_the_formula_says() -> None:
    """However the gradients fall into buckets, once DistributedDataParallel has settled them: 2(W-1) of them in all."""
    run = ss.launch(small_job(strategy=ss.Hierarchical(bucket_mb=0.05), world_size=4, steps=4)).wait(60)
    size = 4 * run.events("start")[0]["num_params"]
    assert set(run.metrics()["sent_bytes"].iloc[2:]) == {all_reduce_bytes(size, 4)}
    across = [event["traffic"]["ring_all_reduce"]["sent_bytes"] for event in run.events("step")[-4:]]
    assert sum(across) == all_reduce_bytes(size, 2)


@pytest.mark.parametrize(
    ("world", "expected"), [(2, 1), (3, 1), (4, 2), (6, 2), (7, 1), (8, 2), (9, 3), (12, 3), (16, 4)]
)
def test_ranks_of_one_machine_play_about_as_many_nodes_as_each_node_has_ranks(
    world: int, expected: int
) -> None:
    assert ss.Hierarchical().ranks_per_node(world) == expected
    assert ss.Hierarchical().ranks_per_node(world, local_world_size=world) == expected


def test_machines_are_nodes_unless_told_otherwise() -> None:
    assert ss.Hierarchical().ranks_per_node(16, local_world_size=8) == 8
    assert ss.Hierarchical(per_node=4).ranks_per_node(16, local_world_size=8) == 4


def test_nodes_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ss.SpecError, match="per_node=3 does not divide world_size=4; use one of 1, 2, 4"):
        small_job(strategy="hierarchical:3", world_size=4)
    assert small_job(strategy="hierarchical:2", world_size=4).strategy.label == "hierarchical:2"


@pytest.mark.ranks(4)  # two machines
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [1, 1, 2, 2]])
def test_machines_of_unequal_size_are_refused(pool: RankPool, tmp_path: Path, sizes: list[int]) -> None:
    job = small_job(strategy="hierarchical", world_size=4)

    def prepare(context: RankContext) -> str:
        strategy = build_strategy(job, replace(context, local_world_size=sizes[context.rank]))
        try:
            strategy.prepare()  # type: ignore[attr-defined]
        except ss.SpecError as error:
            return str(error)
        return f"{strategy.collective.per_node} ranks a node"  # type: ignore[attr-defined]

    expected = "2 ranks a node" if len(set(sizes)) == 1 else "the machines have [1, 2] ranks"
    assert all(expected in answer for answer in pool.run(prepare, tmp_path))


@pytest.mark.weekly
def test_two_machines_of_torchrun_are_two_nodes(tmp_path: Path) -> None:
    """Both play on this machine, each started by a torchrun of its own, as on a real cluster."""
    job = small_job(strategy="hierarchical", world_size=4, steps=3)
    (tmp_path / "job.json").write_text(job.to_json())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}",
    ]  # fmt: skip
    worker = [
        "-m", "shardscope.runtime.worker", "--job", str(tmp_path / "job.json"), "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    machines = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", *worker], env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        )
        for node in (0, 1)
    ]
    try:
        assert [machine.wait(200) for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
    traffic = ss.Run.attach(tmp_path / "run").events("step", rank=1)[-1]["traffic"]
    assert {name: sorted(row["sent_to"]) for name, row in traffic.items()} == {
        "ring_reduce_scatter": ["0"],
        "ring_all_reduce": ["3"],
        "ring_all_gather": ["0"],
    }
