"""`shardscope tune`: a study from a shell, stopped, taken up again, and mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

import shardscope as ss
from conformance.runs import wait_for_steps
from shardscope import PowersOfTwo, cli
from shardscope.commands.tune import read_space
from shardscope.errors import SpecError
from shardscope.runtime.record.bar import is_terminal, is_watched
from shardscope.tuning.objectives import OBJECTIVES
from shardscope.tuning.progress import StudyProgress
from shardscope.tuning.session import StudySession

JOB = ["--model", "mlp", "--ranks", "2", "--steps", "4"]
RATES = ["--space", "optimizer.lr=1e-3:1e-1:log"]


class TestSpace:
    def test_intervals_choices_and_batches(self) -> None:
        assert read_space(
            ["optimizer=adamw,lamb", "optimizer[lamb].lr=1e-3:0.1:log", "warmup=0:0.3", "batch=32:256", "seed=1,2"]
        ) == {
            "optimizer": ["adamw", "lamb"], "optimizer[lamb].lr": (1e-3, 0.1, "log"), "warmup": (0, 0.3),
            "batch": PowersOfTwo(32, 256), "seed": [1, 2],
        }  # fmt: skip

    def test_strategies_have_colons_of_their_own_and_nothing_is_no_space(self) -> None:
        assert read_space(["strategy=ring,pipeline:gpipe"]) == {"strategy": ["ring", "pipeline:gpipe"]}
        assert read_space([]) is None

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["lr"], "is not NAME=RANGE"),
            (["optimizer.lr="], "is not NAME=RANGE"),
            (["optimizer.lr=1:x"], "is not a valid interval; write optimizer.lr=LOW:HIGH"),
            (["optimizer.lr=1:2:lin"], "is not a valid interval"),
            (["seed=1,2", "seed=3,4"], "names 'seed' twice"),
        ],
    )
    def test_what_it_cannot_read_is_named(self, options: list[str], said: str) -> None:
        with pytest.raises(SpecError) as caught:
            read_space(options)
        assert said in str(caught.value)


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--space", "optimizer.lr=0.1"], "has only one choice; write optimizer.lr=LOW:HIGH"),
            (["--space", "optimizr=adamw,lamb"], "optimizer"),
            (["--space", "batch=30:60"], "not a power of two"),
            ([*RATES, "--objective", "lss"], "did you mean 'loss'"),
            ([*RATES, "--sampler", "tpp"], "did you mean 'tpe'"),
            ([*RATES, "--trials", "0"], "trials=0"),
            ([*RATES, "--timeout", "-1"], "timeout_s=-1.0 is not a time limit; give seconds above 0"),
            ([*RATES, "--timeout", "nan"], "timeout_s=nan is not a time limit"),
            ([*RATES, "--promote", "1"], "use an integer of at least 2"),
            ([*RATES, "--seed", "-1"], "seed=-1 is not valid"),
            ([*RATES, "--storage", "nonsense"], "storage="),
            (
                ["--resume", "nothing"],
                "--model applies only to a new study, but --resume names an existing one",
            ),
        ],
    )
    def test_they_are_one_line_with_a_way_out_and_status_two(
        self, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["tune", "--model", "mlp", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("shardscope: ")
        assert error.count("\n") == 1
        assert words in error

    def test_a_study_that_is_not_there_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["tune", "--report", "nothing"]) == 2
        assert "there is no study 'nothing'" in capsys.readouterr().err

    def test_a_study_that_completes_no_trial_ends_with_one_and_the_last_reason(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = [
            "--optimizer",
            "sgd",
            "--space",
            "optimizer.lr=1e30,1e29",
            "--trials",
            "1",
            "--objective",
            "loss",
        ]
        assert cli.main(["tune", *JOB, *options, "--name", "diverges"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("shardscope: no trial was completed; the last one ended because ")

    def test_time_that_is_over_before_the_study_begins_is_one_sentence_after_what_it_was_doing(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        link = ["--link-bandwidth", "1 Gbit/s", "--link-latency", "1 s"]
        assert cli.main(["tune", *JOB, *link, "--name", "late", "--timeout", "0.1"]) == 2
        doing, error = capsys.readouterr().err.splitlines()
        assert doing.startswith("Measuring the gradient noise scale over 4 steps")
        assert error.startswith("shardscope: stopped while the noise scale was being measured")


def test_help_says_what_every_objective_is_and_in_which_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["tune", "--help"])
    text = capsys.readouterr().out
    assert all(f"    {name:9} {about}\n" in text for name, about in OBJECTIVES.items())
    assert "a real run.\nCtrl-C stops the study" in text


class TestProgress:
    def test_in_python_the_lines_are_the_same_where_somebody_sees_them(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = cli_job().replace(steps=2)
        space = {"optimizer.lr": (1e-3, 1e-1, "log")}
        study = ss.tune(
            job, space, trials=1, name="told", objectives=["loss"], baselines=False, progress=True
        )
        rate = study.trials[0].params["optimizer.lr"]
        assert capsys.readouterr().out.splitlines() == [
            f"trial 0  complete  loss {study.trials[0].value:.4g}  optimizer.lr={rate:.3g}"
        ]
        ss.tune(name="told", trials=2)  # into a file or a pipe nothing is told
        assert capsys.readouterr() == ("", "")

    def test_where_lines_can_be_rewritten_the_last_says_what_runs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away() -> None:
            raise StorageInternalError("away")

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        session = StudySession.open(cli_job(), {"optimizer.lr": (1e-3, 1e-1)}, trials=4, name="progress")
        progress = StudyProgress(session, stream=Terminal())
        records = session.records
        monkeypatch.setattr(session, "records", away)
        progress.draw()  # waits for the storage to come back, as the study does
        monkeypatch.setattr(session, "records", records)
        progress._read_at, progress._pace._began = 0.0, time.monotonic() - 60
        trial = session.study.ask()
        trial.suggest_float("optimizer.lr", 1e-3, 1e-1)
        session.study.tell(trial, [0.5, 2.0, 1500.0], TrialState.COMPLETE)
        progress.draw()
        written = progress._stream.getvalue()
        assert "trial 0  complete  loss 0.5  seconds 2 s  bytes 1.5 kB  optimizer.lr=" in written
        assert written.endswith("\r\x1b[K██████░░░░░░░░░░░░░░░░░░ 1/4 trials  about 3 min left")
        progress.close()
        assert progress._stream.getvalue().count("trial 0  complete") == 1

    def test_a_storage_that_is_away_or_out_of_reach_ends_and_holds_up_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away() -> None:
            raise StorageInternalError("away")

        session = StudySession.open(cli_job(), {"optimizer.lr": (1e-3, 1e-1)}, trials=4, name="reach")
        session.study.tell(session.study.ask(), [0.5, 2.0, 1500.0])
        with monkeypatch.context() as patch:
            patch.setattr(session, "records", away)
            StudyProgress(session, quiet=True).close()
            progress = StudyProgress(session, stream=io.StringIO())
        progress.draw()  # the first look that is answered: what had ended before is known by now
        session.study.tell(session.study.ask(), [0.4, 2.0, 1500.0])
        with monkeypatch.context() as patch:
            patch.setattr("shardscope.tuning.progress._LAST_LOOK_S", 0.1)
            never = threading.Event()
            patch.setattr(session, "records", lambda: never.wait(60))
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt), progress:
                raise KeyboardInterrupt
        assert time.monotonic() - began < 30
        never.set()
        assert progress._stream.getvalue() == ""
        progress.close()
        [line] = progress._stream.getvalue().splitlines()
        assert line.startswith("trial 1  complete  loss 0.4")

    def test_streams_that_do_not_say_whether_they_are_terminals_are_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Tee:
            def write(self, text: str) -> None: ...
            def flush(self) -> None: ...

        closed = io.StringIO()
        closed.close()
        for stream in (Tee(), None, closed):
            assert not is_terminal(stream)
            monkeypatch.setattr(sys, "stdout", stream)
            assert not is_watched()
        session = StudySession.open(cli_job(), {"optimizer.lr": (1e-3, 1e-1)}, trials=4, name="tee")
        StudyProgress(session, stream=Tee()).close()  # type: ignore[arg-type]


def cli_job() -> Any:
    from shardscope.commands._job import build_job

    return build_job(cli.build_parser().parse_args(["tune", *JOB]))


class TestRealStudies:
    def test_a_study_is_run_reported_and_gone_on_with(
        self, runs_root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["tune", *JOB, *RATES, "--trials", "2", "--name", "small"]) == 0
        printed = capsys.readouterr()
        assert [line.split("  ")[:2] for line in printed.err.splitlines()] == [
            ["trial 0", "complete"], ["trial 1", "complete"],
        ]  # fmt: skip
        journal = runs_root / "studies/small/journal.log"
        assert printed.out.splitlines()[0].split() == ["trial", "loss", "seconds", "bytes", "settings"]
        assert f"The study is stored in {journal}\n" in printed.out
        assert f"optuna-dashboard {shlex.quote(str(journal))}" in printed.out
        assert cli.main(["tune", "--resume", "small", "--trials", "3", "--json"]) == 0
        resumed = capsys.readouterr()
        assert resumed.err == ""
        assert cli.main(["tune", "--report", "small", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == json.loads(resumed.out)
        assert told["states"] == {"complete": 3}
        assert all(trial["values"]["loss"] > 0 for trial in told["trials"])
        assert told["where"] == str(journal)

    @pytest.mark.weekly
    def test_an_interrupt_loses_nothing_and_says_how_to_go_on(
        self, runs_root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # 5 s a trial, so that it is not over before
        slow = ["100", "--link-bandwidth", "1 Gbit/s", "--link-latency", "25 ms"]
        options = [*JOB[:-1], *slow, *RATES, "--trials", "2", "--name", "stopped", "--root", str(runs_root)]
        process = subprocess.Popen(
            [sys.executable, "-m", "shardscope.cli", "tune", *options], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        wait_for_steps(runs_root)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        again = err.splitlines()[-1].partition("Resume with: ")[2]
        assert shlex.split(again)[:4] == ["shardscope", "tune", "--resume", "stopped"]
        assert cli.main([*shlex.split(again)[1:], "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        first, *others = told["trials"]
        assert first["state"] == "failed"
        assert not first["counted"]
        assert [trial["state"] for trial in others] == ["complete", "complete"]
        assert first["params"] in [trial["params"] for trial in others]
