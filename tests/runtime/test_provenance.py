"""What a run says of where it came from: versions, machine, git state and command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import shardscope as ss
from conformance.damage import recorded_run
from conformance.runs import small_job
from shardscope.runtime.record import provenance
from shardscope.runtime.record.provenance import FILE, Provenance


def git(folder: Path, *arguments: str) -> str:
    own = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    done = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *arguments], cwd=folder, env={**os.environ, **own},
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a repository with one commit, and a folder in it that this process is in."""
    place = tmp_path / "work" / "deeper"
    place.mkdir(parents=True)
    (place / "train.py").write_text("print()\n")
    for arguments in (("init",), ("add", "."), ("commit", "-m", "begin")):
        git(place.parent, *arguments)
    monkeypatch.chdir(place)
    monkeypatch.setattr(provenance, "_GIT_WITHIN_S", 60.0)  # for a busy machine
    return place


def test_a_run_records_versions_machine_commit_and_command(repository: Path) -> None:
    (repository / "notes.txt").write_text("not tracked, so no difference to the commit\n")
    run = ss.launch(small_job(seed=5)).wait(100)
    found = run.provenance
    assert found is not None
    assert found.versions["torch"] == version("torch")
    assert (found.versions["shardscope"], found.seed) == (ss.__version__, 5)
    assert found.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found.commit, found.is_dirty) == (git(repository, "rev-parse", "HEAD"), False)
    assert (found.directory, list(found.command)) == (str(repository), sys.orig_argv)
    assert found.machine["cores"] > 0
    assert abs(found.time - (run.path / "job.json").stat().st_mtime) < 60
    assert str(found.commit)[:10] in run._repr_html_()
    (repository / "train.py").write_text("print('changed')\n")
    now = Provenance.here(command=sys.orig_argv, seed=5)
    assert list(found.differences(now)) == [
        f"the working directory is modified since commit {str(found.commit)[:10]}"
    ]


def test_where_there_is_no_repository_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    found = Provenance.here(command=[])
    assert (found.commit, found.is_dirty) == (None, None)


@pytest.mark.parametrize("script", ["sleep 60", "exit 1"])
def test_a_git_that_hangs_or_fails_is_given_up(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nexec {script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_WITHIN_S", 0.3)
    began = time.monotonic()
    found = Provenance.here(command=[])
    assert time.monotonic() - began < 20
    assert (found.commit, found.is_dirty) == (None, None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"time": "now"}', '{"time": 1, "versions": 3, "command": [1, {}], "seed": []}', "\x00"],
)
def test_a_damaged_or_missing_record_hides_nothing_else(runs_root: Path, text: str) -> None:
    path = recorded_run(runs_root)
    run = ss.Run.attach(path)
    assert run.provenance is None  # as in runs of earlier versions
    (path / FILE).write_text(text)
    assert run.provenance is None or run.provenance.versions == {}
    assert run.name in run._repr_html_()


def test_a_record_of_a_newer_version_is_read_as_far_as_it_is_known(runs_root: Path) -> None:
    path = recorded_run(runs_root)
    (path / FILE).write_text(
        json.dumps({"time": 1.5, "moon": "full", "versions": {"torch": "9.0"}, "commit": "abc"})
    )
    found = ss.Run.attach(path).provenance
    assert found is not None
    assert (found.time, str(found)) == (1.5, "torch 9.0, commit abc")


def test_differences_are_a_sentence_each() -> None:
    then = Provenance(
        0.0, (), "", 0, {"torch": "2.12.0", "numba": "0.60"}, {"cpu": "A", "gpus": ["H100"]}, "a" * 40, True
    )
    now = Provenance(9.0, ("x",), "/", 1, {"torch": "2.13.0"}, {"cpu": "A", "gpus": []}, None, None)
    assert list(then.differences(now)) == [
        "torch was 2.12.0 and is 2.13.0",
        "numba was 0.60 and is none",
        "gpus was ['H100'] and is none",
        f"git commit of the working directory was {'a' * 40} and is none",
        "the working directory was modified since commit aaaaaaaaaa",
    ]
    assert list(now.differences(now)) == []
