"""`shardscope run --emulate`: its keys are the arguments of `Cluster.emulated`, and its ranks those of the cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from shardscope import cli
from shardscope.commands._emulated import build_emulated


def parsed(*words: str) -> object:
    return build_emulated(cli.build_parser().parse_args(["run", *words]))


def test_every_argument_of_a_cluster_can_be_given() -> None:
    text = (
        "nodes=4, bandwidth=1 Gbit/s,latency=1 ms,per_node=2,node_bandwidth=1:100 Mbit/s;2:200 Mbit/s,"
        "upload=0:10 Mbit/s,slowdown=3:2.5,flops=2 GFLOP/s,memory_bandwidth=1 GB/s,racks=2,rack_bandwidth=2 Gbit/s,"
        "memory=1 GB,node_flops=0:4 GFLOP/s;1:3 GFLOP/s,node_memory=0:2 GB"
    )
    assert parsed("--emulate", text) == ss.Cluster.emulated(
        nodes=4, bandwidth="1 Gbit/s", latency="1 ms", per_node=2,
        node_bandwidth={1: "100 Mbit/s", 2: "200 Mbit/s"}, upload={0: "10 Mbit/s"}, slowdown={3: 2.5},
        flops="2 GFLOP/s", memory_bandwidth="1 GB/s", racks=2, rack_bandwidth="2 Gbit/s",
        memory="1 GB", node_flops={0: "4 GFLOP/s", 1: "3 GFLOP/s"}, node_memory={0: "2 GB"},
    )  # fmt: skip
    assert parsed() is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bandwith=1 Gbit/s", "did you mean 'bandwidth'?"),
        ("4", "--emulate '4' is not KEY=VALUE"),
        ("nodes=", "is not KEY=VALUE"),
        ("nodes=four", "--emulate nodes='four' is not a whole number"),
        ("slowdown=2", "is not NODE:VALUE"),
        ("slowdown=9:2", "slowdown names node 9, but the nodes are 0 to 3"),
        ("slowdown=0:2,slowdown=1:3", "has slowdown twice; give it once, for example slowdown=0:2;1:3"),
        ("nodes=2, nodes = 4", "has nodes twice; give it once, for example nodes=4"),
        ("slowdown=0:2;1:4;0:3", "slowdown has node 0 twice; give it once, for example slowdown=0:3"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--emulate", text]) == 2
    assert told in capsys.readouterr().err


def test_a_prediction_takes_the_cluster_and_its_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "mlp", "--emulate", "nodes=4,bandwidth=100 Mbit/s", "--predict", "--json"]
    assert cli.main(["run", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cluster"] == "4 emulated nodes, 100 Mbit/s"
    assert shown["job"]["world_size"] == 4
    assert cli.main(["run", *options, "--cluster", "h100"]) == 2
    assert "--cluster and --emulate both say where the job runs" in capsys.readouterr().err


def resumable(folder: Path) -> Path:
    """A run on an emulated cluster of two nodes, as far as the command line reads it, with a checkpoint."""
    run = folder / "earlier"
    (run / "checkpoints" / "step-10").mkdir(parents=True)
    (run / "job.json").write_text(ss.Job(model="mlp", data="digits").to_json())
    (run / "cluster.json").write_text(ss.Cluster.emulated(nodes=2).to_json())
    return run


def test_the_cluster_is_that_of_the_run_to_resume_unless_another_is_given(tmp_path: Path) -> None:
    run = resumable(tmp_path)
    for source in (run, run / "checkpoints" / "step-10"):
        assert parsed("--resume", str(source)) == ss.Cluster.emulated(nodes=2)
        assert parsed("--resume", str(source), "--emulate", "nodes=3") == ss.Cluster.emulated(nodes=3)
        assert parsed("--resume", str(source), "--emulate", "none") is None
    alone = (run / "checkpoints" / "step-10").rename(tmp_path / "step-10")
    assert parsed("--resume", str(alone)) is None


def test_a_job_that_the_cluster_of_the_run_to_resume_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--model", "mlp", "--ranks", "4", "--resume", str(resumable(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert "world_size=4 does not match the 2 ranks of 2 emulated nodes" in said
    assert "the run to resume was on 2 emulated nodes" in said
    assert "--emulate none" in said


@pytest.mark.slow
def test_it_trains_there(capsys: pytest.CaptureFixture[str]) -> None:
    needs_namespaces()
    assert cli.main(["run", "--model", "mlp", "--steps", "5", "--emulate", "nodes=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["link"] == "2 emulated nodes, 1 Gbit/s"
