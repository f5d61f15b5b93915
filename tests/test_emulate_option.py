"""`shardscope run --emulate`: its keys are the arguments of `Cluster.emulated`, and its ranks those of the cluster."""

from __future__ import annotations

import json

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
        "upload=0:10 Mbit/s,slowdown=3:2.5,racks=2,rack_bandwidth=2 Gbit/s"
    )
    assert parsed("--emulate", text) == ss.Cluster.emulated(
        nodes=4, bandwidth="1 Gbit/s", latency="1 ms", per_node=2,
        node_bandwidth={1: "100 Mbit/s", 2: "200 Mbit/s"}, upload={0: "10 Mbit/s"}, slowdown={3: 2.5}, racks=2,
        rack_bandwidth="2 Gbit/s",
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
    ],
)
def test_what_cannot_be_read_is_refused(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--emulate", text]) == 2
    assert told in capsys.readouterr().err


def test_a_prediction_takes_the_cluster_and_its_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "mlp", "--emulate", "nodes=4,bandwidth=100 Mbit/s", "--predict", "--json"]
    assert cli.main(["run", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cluster"] == "4 emulated nodes, 100 Mbit/s, 0 s"
    assert shown["job"]["world_size"] == 4
    assert cli.main(["run", *options, "--cluster", "h100"]) == 2
    assert "--cluster and --emulate both say where the job runs" in capsys.readouterr().err


@pytest.mark.slow
def test_it_trains_there(capsys: pytest.CaptureFixture[str]) -> None:
    needs_namespaces()
    assert cli.main(["run", "--model", "mlp", "--steps", "5", "--emulate", "nodes=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["link"] == "2 emulated nodes, 1 Gbit/s, 0 s"
