"""Code that a job carries is run for whoever handed it over in this session, and else on the user's word only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
from torch import nn

import shardscope as ss
from conformance.damage import Bomb, plant_code, recorded_run
from conformance.runs import small_job
from shardscope import cli
from shardscope.runtime.record.code_file import CODE_FILE
from shardscope.runtime.record.rundir import RunDir


def local_model() -> Callable[[], nn.Module]:
    """A function as a notebook has it: in no module that could be imported."""

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    return make_model


make_model = local_model()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def own(runs_root: Path) -> Path:
    """A run whose model is a function of this process's."""
    return recorded_run(runs_root, model=make_model)


def foreign(path: Path, mark: Path) -> Path:
    """The same run once somebody has put other code into it."""
    (path / CODE_FILE).write_bytes(cloudpickle.dumps({"model": Bomb(mark)}))
    return path


def test_code_of_this_process_is_loaded_without_asking(own: Path) -> None:
    for where in (own, str(own / "job.json"), own.name, ss.Run.attach(own)):
        assert ss.load_job(where).user_code["model"].function.__name__ == "make_model"


def test_a_launched_run_keeps_the_functions_that_it_was_given() -> None:
    job = small_job(model=make_model, checkpoint=ss.Checkpoint(every=5))
    run = ss.launch(job).wait(60)
    assert run.job.user_code["model"].function is make_model
    assert ss.launch(run.job.replace(steps=12), resume=run).wait(60).state == "completed"


def test_a_job_without_code_is_read_without_asking(runs_root: Path, mark: Path) -> None:
    path = recorded_run(runs_root)
    plant_code(path, mark)
    assert ss.load_job(path).model == "mlp"
    assert not mark.exists()


def test_code_of_anybody_else_is_named_and_not_run(own: Path, mark: Path) -> None:
    foreign(own, mark)
    with pytest.raises(
        ss.errors.UntrustedCode,
        match=r"contains code: model='make_model' in .*user_code\.pkl .*trust_code=True",
    ):
        ss.load_job(own)
    assert not mark.exists()
    with pytest.raises(ss.errors.LaunchError, match="does not contain the functions of this job"):
        ss.load_job(own, trust_code=True)
    assert mark.exists(), "this test would not notice code that runs"


def test_trusted_code_that_cannot_be_loaded_is_one_sentence(own: Path) -> None:
    (own / CODE_FILE).write_bytes(b"no pickle")
    with pytest.raises(ss.errors.LaunchError, match="cannot be loaded"):
        ss.load_job(own, trust_code=True)


@pytest.mark.slow
def test_code_of_an_earlier_session_runs_once_it_is_trusted(own: Path, tmp_path: Path) -> None:
    """In another process nothing in this directory is its own."""
    shell = [
        sys.executable,
        "-m",
        "shardscope.cli",
        "run",
        "--root",
        str(tmp_path / "again"),
        "--job",
        str(own / "job.json"),
    ]
    asked = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 2
    assert asked.stderr.startswith(f"shardscope: {own / 'job.json'} contains code: model='make_model'")
    assert len(asked.stderr.splitlines()) == 1
    trusted = subprocess.run([*shell, "--trust-code"], capture_output=True, text=True, timeout=120)
    assert trusted.returncode == 0, trusted.stderr


@pytest.mark.parametrize(("answer", "runs"), [("y", True), ("", False), ("n", False)])
def test_somebody_at_a_terminal_is_asked(
    answer: str,
    runs: bool,
    own: Path,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    foreign(own, mark)
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _question: answer)
    assert (
        cli.main(["run", "--job", str(own / "job.json")]) == 2
    )  # trusted or not, there is no such function in it
    assert mark.exists() == runs
    assert "contains code: model='make_model'" in capsys.readouterr().err


def test_a_job_file_alone_names_its_functions_and_cannot_run_them(own: Path, tmp_path: Path) -> None:
    shutil.copy(own / "job.json", tmp_path)
    with pytest.raises(ss.SpecError, match="give the function again"):
        ss.launch(ss.load_job(tmp_path / "job.json", trust_code=True))


def test_ranks_load_only_what_their_own_launch_wrote(own: Path, mark: Path) -> None:
    code = (own / CODE_FILE).read_bytes()
    launched = RunDir.create(small_job(model=make_model), own.parent)
    assert launched.read_job(with_code=True).user_code["model"].function.__name__ == "make_model"
    foreign(launched.path, mark)
    with pytest.raises(ss.errors.LaunchError, match="has changed since the launch"):
        launched.read_job(with_code=True)
    assert RunDir(launched.path).read_job(with_code=True).user_code["model"].name == "make_model"
    (launched.path / CODE_FILE).write_bytes(code)
    assert not mark.exists()


def test_opening_resuming_and_listing_a_foreign_run_runs_nothing_in_it(
    own: Path, mark: Path, tmp_path: Path
) -> None:
    plant_code(own, mark)
    run = ss.Run.attach(own)
    (run.metrics(), run.summary(), run._repr_html_(), run.logs(0), ss.runs())
    with pytest.raises(ss.RunFailed):
        ss.launch(small_job(), resume=run, root=tmp_path / "resumed").wait(60)
    assert not mark.exists()
