"""The commands about runs on disk: show, logs, report; and how a run is named on the command line."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

import shardscope as ss
from shardscope import cli
from shardscope.commands._output import coloured
from shardscope.commands.logs import read_logs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    """A finished run of five steps, beside nothing else."""
    root = tmp_path_factory.mktemp("runs")
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=5, name="small")
    return ss.launch(job, root=root).wait()


def test_a_run_that_does_not_exist_is_one_line_with_the_way_out(
    run: ss.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(run.path.parent)
    for command in ("stop", "show", "logs", "reproduce"):
        assert cli.main([command, "smalll", "--root", root]) == 2
        assert capsys.readouterr().err == (
            f"shardscope: no run 'smalll'; `shardscope runs --root {root}` lists all runs\n"
        )
    assert cli.main(["show", "SMALL", "--root", root]) == 2
    assert f"did you mean {run.id}?" in capsys.readouterr().err


def test_show_prints_settings_and_results(run: ss.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(run.path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "completed",
        "mlp on digits, ring, 2 ranks",
        "adamw, batch 64, fp32",
        "5 of 5",
        str(run.path),
    ):
        assert words in said
    assert cli.main(["show", str(run.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["job"]["steps"], shown["summary"]["loss"]) == (5, run.summary().loss)


def test_logs_are_read_by_rank_and_cannot_steer_the_terminal(tmp_path: Path) -> None:
    for rank, text in enumerate(("hello\n", "\x1b[2Jgone\n")):
        folder = tmp_path / f"run_x/attempt_0/{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(text)
        (folder / "stderr.log").touch()
    (tmp_path / "agent.log").write_text("started\n")
    assert read_logs(tmp_path) == {
        "agent.log": "started", "run_x/attempt_0/0/stdout.log": "hello",
        "run_x/attempt_0/1/stdout.log": r"\x1b[2Jgone",
    }  # fmt: skip
    assert read_logs(tmp_path, rank=0) == {"run_x/attempt_0/0/stdout.log": "hello"}


def test_logs_of_emulated_nodes_are_those_of_the_runs_ranks(tmp_path: Path) -> None:
    for node, local_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        folder = tmp_path / f"node-{node}/run_x/attempt_0/{local_rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"node {node}, rank {local_rank}")
    found = [list(read_logs(tmp_path, rank=rank, per_node=2).values()) for rank in range(4)]
    assert found == [["node 0, rank 0"], ["node 0, rank 1"], ["node 1, rank 0"], ["node 1, rank 1"]]


def test_logs_of_a_rank_that_the_run_does_not_have(run: ss.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", str(run.path), "--rank", "2"]) == 2
    assert "--rank 2 is not a rank of" in capsys.readouterr().err
    assert cli.main(["logs", str(run.path), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_report_writes_a_page_and_prints_what_it_found(
    run: ss.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    command = [
        "report",
        "--root",
        str(run.path.parent),
        "--to",
        str(target),
        "--title",
        "Mine",
        "--no-predicted",
    ]
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(target), "findings": [ss.accuracy(run.path.parent).headline],
    }  # fmt: skip
    page = target.read_text()
    assert "<h1>Mine</h1>" in page
    assert "1 step-time prediction checked so far on this machine, with an error of " in page
    assert cli.main(["report", str(run.path), "--to", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written (No such file or directory); choose another path" in capsys.readouterr().err


def test_a_report_needs_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--root", str(tmp_path)]) == 2
    assert "start one with: shardscope run" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    assert coloured("x", "red", io.StringIO()) == "x"
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    assert coloured("x", "red", Terminal()) == "x"
