"""A run directory is data from outside: whatever is in it, readers list the good runs and say what they skip."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import pytest

import shardscope as ss
from conformance.damage import NAMES, TERABYTE, damage, plant_code, recorded_run
from shardscope import cli
from shardscope.runlog.tail import LONGEST_LINE
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.rundir import RunDir


@pytest.fixture
def good(runs_root: Path) -> Path:
    return recorded_run(runs_root)


@pytest.fixture
def bad(good: Path, runs_root: Path) -> Path:
    """A run beside the good one, to be damaged."""
    return recorded_run(runs_root, name="bad")


def listed() -> list[str]:
    return [run.name for run in ss.runs()]


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", "{", "[" * 100_000, "\x00", '{"model": 1}', "9" * 10_000]
)
def test_a_damaged_job_hides_no_good_run(text: str, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bad / "job.json").write_text(text)
    assert listed() == ["good"]
    assert bad.name in ss.runs().note
    assert ss.runs().note.startswith("1 run could not be read: ")
    with pytest.raises(ss.errors.RunUnreadable, match=bad.name):
        ss.Run.attach(bad)
    assert cli.main(["runs"]) == 0
    told = capsys.readouterr()
    assert "good" in told.out
    assert "skipped: " in told.err
    assert cli.main(["runs", "--json"]) == 0
    assert [row.get("state", "unreadable") for row in json.loads(capsys.readouterr().out)] == [
        "completed",
        "unreadable",
    ]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", "{", '{"state": "dancing"}', '{"state": [], "pid": 1}', "[" * 100_000]
)
def test_a_run_that_does_not_say_how_it_stands_is_judged_by_its_events(text: str, bad: Path) -> None:
    (bad / "status.json").write_text(text)
    assert [run.state for run in ss.runs()] == ["completed", "completed"]


@pytest.mark.parametrize("text", [None, "{}", "[" * 100_000])
def test_nobody_waits_for_a_run_that_says_nothing_at_all(text: str | None, bad: Path) -> None:
    (bad / "status.json").unlink()
    if text is not None:
        (bad / "status.json").write_text(text)
    for log in bad.glob("rank-*.jsonl"):
        log.unlink()
    run = ss.Run.attach(bad)
    assert run.state == "failed"
    with pytest.raises(ss.RunFailed, match=r"it is unknown how run .* ended: .*status\.json"):
        run.wait(10)


def test_a_status_of_another_version_is_read_as_far_as_it_is_known(bad: Path) -> None:
    status = json.loads((bad / "status.json").read_text())
    (bad / "status.json").write_text(json.dumps({**status, "state": "stopped", "mood": {"good": [1]}}))
    assert ss.Run.attach(bad).state == "stopped"


AS_SOMEBODY_ELSE = """
import os, sys
import shardscope as ss
assert not ss.runs("/nowhere")  # imports what it needs, which others may not read
if os.getuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
found = ss.runs(sys.argv[1])
print(len(found), found.note)
"""


def test_another_users_private_run_is_skipped_and_counted() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        good, private = recorded_run(root), recorded_run(root, name="private")
        root.chmod(0o755)
        if os.getuid() == 0:
            for path in (good, *good.rglob("*")):
                os.chown(path, 65534, 65534)
        else:
            private.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", AS_SOMEBODY_ELSE, folder],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=200,
        )
        private.chmod(0o700)
        told = f"1 1 run could not be read: {private.name} (private to user "
        assert done.stdout.startswith(told), done.stderr


@pytest.mark.parametrize("name", ["job.json", "status.json", "rank-0.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "zero", "passwd", "sparse"])
def test_nothing_but_a_file_of_moderate_size_is_read(name: str, kind: str, bad: Path) -> None:
    file = bad / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        file.touch()
        os.truncate(file, TERABYTE)
    else:
        file.symlink_to({"loop": file, "zero": Path("/dev/zero"), "passwd": Path("/etc/passwd")}[kind])
    assert listed()[-1] == "good"
    if name == "job.json":
        with pytest.raises(ss.errors.RunUnreadable, match=r"job\.json (is|has) "):
            ss.Run.attach(bad)
    else:
        run = ss.Run.attach(bad)
        assert run.state == "completed"
        is_lost = name == "rank-0.jsonl"  # then no step is known to have finished on all ranks
        assert (len(run.metrics()), len(run.events("step", rank=1))) == (0 if is_lost else 5, 5)
        assert [name in problem for problem in run.problems] == [True] * is_lost


def test_a_run_says_what_of_its_logs_could_not_be_read(bad: Path) -> None:
    assert ss.Run.attach(bad).problems == ()
    with (bad / "rank-1.jsonl").open("a") as file:
        file.write('{"event": "step"}\n[]\n')
    (bad / "rank-0.jsonl").unlink()
    (bad / "rank-0.jsonl").mkdir()
    run = ss.Run.attach(bad)
    problems = ("rank-0.jsonl is a folder, not a file", "2 lines of the run's logs cannot be read as events")
    assert run.problems == problems
    assert all(escape(problem) in run._repr_html_() for problem in problems)


def test_a_job_file_that_is_a_pipe_is_refused_and_one_of_the_shell_is_read(bad: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["run", "--job", str(tmp_path / "pipe")]) == 2
    with (bad / "job.json").open() as job:
        asked = [sys.executable, "-m", "shardscope.cli", "run", "--job", "/dev/stdin", "--steps", "0"]
        done = subprocess.run(asked, stdin=job, capture_output=True, text=True, timeout=200)
    assert "steps" in done.stderr, "the job was read, and refused for its steps"


def test_a_log_is_read_up_to_a_line_that_no_rank_wrote(bad: Path) -> None:
    with (bad / "rank-0.jsonl").open("ab") as file:
        file.write(b"x" * (LONGEST_LINE + 2) + b"\n")
    run = ss.Run.attach(bad)
    assert len(run.metrics()) == 5
    tail = run.tail()
    assert len(tail.poll()) == len(run.events())
    assert "more than" in tail.problems["rank-0.jsonl"]
    assert tail.poll() == []


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_of_any_name_is_listed_or_named_among_those_skipped(name: str, bad: Path) -> None:
    bad.rename(bad.with_name(name))
    found = ss.runs()
    assert len(found) + len(found.skipped) == 2
    assert len(found) == 1 + name.isprintable()
    found.note.encode()
    assert "\n" not in found.note


def test_a_forged_status_gets_no_other_process_killed(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardscope.runtime.record.run._KILL_AFTER_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as victim:
        RunDir(bad).write_status("running", pid=victim.pid, process_started=process_started(victim.pid))
        ss.Run.attach(bad).stop(grace_s=0.0)
        assert victim.poll() is None
        victim.kill()


@pytest.mark.parametrize("folder", ["control", "logs", "checkpoints"])
def test_a_linked_folder_leads_nothing_out_of_the_directory(
    folder: str, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.runtime.record.run._KILL_AFTER_S", 0.0)
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(bad / folder)
    (bad / folder).symlink_to(outside)
    directory = RunDir(bad)
    directory.write_status("running", pid=os.getpid(), process_started=process_started())
    run = ss.Run.attach(bad)
    with contextlib.suppress(ss.ShardscopeError):
        run.stop(grace_s=0.0)
    with contextlib.suppress(ss.ShardscopeError):
        run.approve(1)
    (run.logs(), run.logs(0))
    assert list(outside.iterdir()) == []


def test_links_in_the_place_of_written_files_are_replaced_and_not_followed(bad: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (bad / "status.json").unlink()
    (bad / "status.json").symlink_to(precious)
    (bad / f".status.json.{os.getpid()}").symlink_to(precious)
    RunDir(bad).write_status("stopped", pid=1, process_started=0.0)
    assert ss.Run.attach(bad).state == "stopped"
    (bad / "rank-0.jsonl").unlink()
    (bad / "rank-0.jsonl").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        EventWriter(bad / "rank-0.jsonl", 0)
    assert precious.read_text() == "keep"


def test_half_a_surrogate_pair_or_a_control_character_reaches_no_terminal(bad: Path) -> None:
    status = json.loads((bad / "status.json").read_text())
    status |= {
        "state": "failed",
        "error": {"message": "\x1b[2J", "traceback": "\ud800", "rank": "x", "step": -1},
    }
    (bad / "status.json").write_text(json.dumps(status))
    with (bad / "rank-0.jsonl").open("a") as file:
        file.write('{"event": "note", "t": 1, "rank": 0, "text": "\\ud800"}\n')
    run = ss.Run.attach(bad)
    assert str(run.error) == "\\x1b[2J\n\n\\ud800"
    assert not run.events("note")


def test_seeded_damage_is_never_raw_and_never_executed(good: Path, runs_root: Path, tmp_path: Path) -> None:
    """A slice of the campaign `damaged_runs`, which asks every reader."""
    mark, outside = tmp_path / "mark", tmp_path / "outside"
    outside.mkdir()
    for seed in range(60):
        path = recorded_run(runs_root, name="bad")
        plant_code(path, mark)
        what = damage(path, random.Random(seed), outside)
        found = ss.runs()
        assert good.name in {run.id for run in found}, what
        for run in found:
            assert run.state in {"completed", "failed", "stopped", "running", "starting"}, what
            (run.metrics(), run.timeline(), run.memory(), run.summary(), run.logs(), run._repr_html_()), what
        for left in set(runs_root.iterdir()) - {good}:
            subprocess.run(["rm", "-rf", "--", left], check=True)
    assert not mark.exists()
    assert not list(outside.iterdir())
