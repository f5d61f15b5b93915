"""`shardscope simulate`: layouts, jobs and traces, and options that have no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.cli import main
from shardscope.runlog.chakra import COLLECTIVE, TraceNode, write_nodes

LAYOUT = ["gpt2", "--cluster", "a100-80gb", "--data", "8", "--global-batch", "64"]


def test_a_layout_is_simulated_with_a_slow_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *LAYOUT, "--straggler", "3=1.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layout = ss.Layout(data=8, global_batch=64)
    asked = ss.simulate(ss.Model.of("gpt2"), ss.Cluster.of("a100-80gb"), layout, stragglers={3: 1.5})
    assert found["step_time_s"] == asked.step_time_s


def test_a_job_is_read_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=4, link=ss.Link.of("25GbE"))
    (tmp_path / "job.json").write_text(job.to_json())
    assert main(["simulate", "--job", str(tmp_path / "job.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == ss.simulate(job).step_time_s


def test_traces_are_sorted_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("google.protobuf")
    names = [f"step.{rank}.et" for rank in range(12)]
    for rank, name in enumerate(names):  # only ranks 2 and 3 communicate, as their group's name says
        calls = [TraceNode(1, "sum", COLLECTIVE, attributes={"comm_size": 10**9, "pg_name": "[2, 3]"})]
        write_nodes(tmp_path / name, calls if rank in {2, 3} else [])
    paths = [str(tmp_path / name) for name in sorted(names)]
    asked = [
        "simulate",
        "--trace",
        *paths,
        "--link",
        "1 GB/s",
        "--latency",
        "0",
        "--algorithm",
        "all_reduce=tree",
    ]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == pytest.approx(2.0)
    assert [row["link"] for row in found["links"]] == [
        "rank 2, out",
        "rank 3, out",
        "rank 2, in",
        "rank 3, in",
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "needs a model with a layout, --job FILE, or --trace"),
        ([*LAYOUT, "--job", "job.json"], "give one"),
        (["gpt2", "--data", "8"], "add --cluster"),
        ([*LAYOUT, "--overlap"], "--overlap has no effect with a model"),
        (["--trace", "a.et", "--link", "25GbE", "--tensor", "2"], "--tensor has no effect with --trace"),
        (["--trace", "a.et"], "needs --link or --cluster"),
        (["--trace", "a.et", "--cluster", "a100-80gb", "--latency", "0"], "--latency has no effect without --link"),
        (["--trace", "a.et", "--link", "25GbE", "--algorithm", "tree"], "is not OP=NAME"),
        ([*LAYOUT, "--straggler", "3"], "is not RANK=FACTOR"),
    ],
)  # fmt: skip
def test_options_without_effect_are_named(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "calls", "said"),
    [
        (["a/step.0.et", "b/step.0.et"], 8, "names differ in the number of the rank"),
        (["step.et", "step.1.et"], 8, "names differ in the number of the rank"),
        (["step.0.et", "step.1.et"], 0, "the traces contain nothing that takes time"),
        (["step.0.et", "step.1.et"], 4, "but not by ranks"),
    ],
)
def test_traces_of_unclear_or_missing_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], calls: int, said: str
) -> None:
    pytest.importorskip("google.protobuf")
    group = str([*range(calls)]) if calls else ""
    nodes = (
        [TraceNode(1, "sum", COLLECTIVE, attributes={"comm_size": 10**6, "pg_name": group})] if calls else []
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_nodes(tmp_path / name, nodes)
    paths = [str(tmp_path / name) for name in names]
    assert main(["simulate", "--trace", *paths, "--link", "25GbE"]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_is_slowed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *LAYOUT, "--straggler", "1=2", "--straggler", "1=3"]) == 2
    assert "--straggler is given twice for 1" in capsys.readouterr().err
