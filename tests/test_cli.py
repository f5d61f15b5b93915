"""The command line: options become a job, mistakes become one line, runs end when they are told to."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import shardscope as ss
from conformance.events import step_event
from conformance.runs import wait_for_steps
from shardscope import cli
from shardscope.commands import lab
from shardscope.commands._job import build_job
from shardscope.commands._output import aligned, human_bytes
from shardscope.commands._progress import Progress, table
from shardscope.commands.run import stop
from shardscope.errors import LaunchError, SpecError
from shardscope.runlog.reducer import RunLog
from shardscope.runtime import Summary
from shardscope.spec import Job, Link

TINY = ["run", "--model", "mlp", "--ranks", "2", "--steps", "5"]


def job_from(*options: str) -> Job:
    return build_job(parse("run", *options))


def parse(*argv: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(argv)


def start(*argv: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, in a group that a Ctrl-C can be sent to."""
    command = [sys.executable, "-m", "shardscope.cli", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


class TestJobFromOptions:
    def test_without_options_it_is_the_small_gpt_on_two_ranks(self) -> None:
        job = job_from()
        assert (job.model, job.data, job.strategy.name, job.world_size) == (
            "gpt-nano",
            "python-source",
            "ring",
            2,
        )

    def test_data_follows_what_the_model_reads(self) -> None:
        assert job_from("--model", "cnn").data == "digits"

    def test_every_option_reaches_its_field(self, tmp_path: Path) -> None:
        job = job_from(
            *("--model", "mlp", "--data", "digits", "--strategy", "all-reduce", "--ranks", "4"),
            *("--optimizer", "lamb", "--lr", "0.004", "--batch", "32", "--micro-batch", "4"),
            *("--precision", "bf16", "--recompute", "full", "--steps", "7", "--seed", "3", "--name", "mine"),
        )  # fmt: skip
        assert (job.strategy.name, job.world_size, job.steps, job.seed) == ("all-reduce", 4, 7, 3)
        assert (job.optimizer.name, job.optimizer.lr) == ("lamb", 0.004)
        assert (job.batch.global_batch, job.batch.micro_batch) == (32, 4)
        assert (job.precision, job.recompute, job.name) == ("bf16-mixed", "full", "mine")

    def test_a_link_needs_both_its_figures_and_zero_needs_no_unit(self) -> None:
        link = job_from("--link-bandwidth", "1 Gbit/s", "--link-latency", "0").link
        assert link == Link(bandwidth="1 Gbit/s", latency_s=0)
        for options, message in [
            (("--link-bandwidth", "1 Gbit/s"), "give the latency as well, such as '1 ms', or 0 for none"),
            (("--link-latency", "1 ms"), "give the bandwidth as well, such as '100 Mbit/s'"),
            (("--link-bandwidth", "1 Gbit/s", "--link-latency", "5"), "--link-latency='5' has no unit"),
            (("--link-bandwidth", "0", "--link-latency", "0"), "bandwidth=0.0 is not valid"),
        ]:
            with pytest.raises(SpecError, match=message):
                job_from(*options)

    def test_methods_and_their_settings_have_options(self) -> None:
        job = job_from(
            *("--optimizer", "lamb", "--optimizer-set", "variant=apex", "--lr", "0.01"),
            *("--lr-schedule", "cosine", "--lr-schedule-set", "warmup_steps=5", "--lr-schedule-set", "final_ratio=0.1"),
        )  # fmt: skip
        assert (job.optimizer.settings["max_grad_norm"], job.optimizer.lr) == (1.0, 0.01)
        assert job.lr_schedule == ss.LRSchedule("cosine", warmup_steps=5, final_ratio=0.1)
        with pytest.raises(SpecError, match="--lr-schedule-set 'cosine' is not NAME=VALUE"):
            job_from("--lr-schedule-set", "cosine")
        with pytest.raises(SpecError, match="cosine setting='pace' is not known"):
            job_from("--lr-schedule", "cosine", "--lr-schedule-set", "pace=2")

    def test_single_needs_no_word_on_ranks(self) -> None:
        assert job_from("--strategy", "single").world_size == 1

    def test_options_change_a_job_file_and_keep_the_rest(self, tmp_path: Path) -> None:
        path = tmp_path / "job.json"
        path.write_text(
            job_from("--model", "mlp", "--optimizer", "lars", "--lr", "2", "--batch", "32").to_json()
        )
        job = job_from("--job", str(path), "--steps", "9", "--micro-batch", "8")
        assert (job.steps, job.model, job.optimizer.name, job.optimizer.lr) == (9, "mlp", "lars", 2.0)
        assert (job.batch.global_batch, job.batch.micro_batch) == (32, 8)
        assert job_from("--job", str(path), "--lr", "3").optimizer.name == "lars"

    def test_another_optimizer_does_not_inherit_the_old_ones_settings(self, tmp_path: Path) -> None:
        path = tmp_path / "job.json"
        path.write_text(job_from("--optimizer", "lars", "--lr", "2").to_json())
        assert job_from("--job", str(path), "--optimizer", "adamw").optimizer.lr == 1e-3

    def test_a_job_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"nothing\.json.*No such file"):
            job_from("--job", str(tmp_path / "nothing.json"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--model", "gpt-nan"], "gpt-nano"),
            (["--strategy", "rng"], "ring"),
            (["--optimizer", "lam"], "lamb"),
            (["--batch", "7"], "world_size=2"),
            (["--precision", "fp8"], "fp16-mixed"),
            (["--steps", "0"], "steps"),
        ],
    )
    def test_they_are_one_line_with_a_way_out_and_status_two(
        self, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["run", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("shardscope: ")
        assert error.count("\n") == 1
        assert words in error

    @pytest.mark.parametrize("command", [["stop", "x", "--grace-s", "-1"], ["lab", "--port", "99999"]])
    def test_numbers_that_mean_nothing_are_refused_before_anything_is_done(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"shardscope: {' '.join(command[-2:])} is not ")
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["rnu"], "shardscope: unknown command 'rnu'; did you mean run? Options"),
            (
                ["run", "--modle", "mlp"],
                "shardscope run: unknown option --modle; did you mean --model? Options",
            ),
            (["run", "mlp"], "shardscope run: unexpected argument 'mlp'. Options"),
            (
                ["export", "x", "--format", "parkuet"],
                "unknown value 'parkuet'; did you mean parquet? Options",
            ),
            (["tune", "--qqqqq"], "shardscope tune: unknown option --qqqqq. Options"),
        ],
    )
    def test_a_misspelt_word_is_one_line_that_suggests_the_nearest(
        self, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1

    def test_help_names_every_exit_status(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            cli.main(["--help"])
        text = capsys.readouterr().out
        assert all(f"\n    {status} " in text for status in (0, 1, 2, 130))


class TestProgress:
    def test_a_step_counts_once_every_rank_has_done_it(self) -> None:
        progress = Progress(10, RunLog(world_size=2), stream=io.StringIO())
        progress.feed([step_event(1, 0, loss=1.0)])
        assert progress.last_step == 0
        progress.feed([{"event": "end", "rank": 0, "t": 1.0}, step_event(1, 1, loss=3.0)])
        assert progress.last_step == 1
        assert progress.line().endswith("1/10  loss 2.0000  100 ms/step  80 samples/s")

    def test_where_lines_cannot_be_rewritten_one_is_printed_a_tenth(self) -> None:
        stream = io.StringIO()
        progress = Progress(100, RunLog(world_size=1), stream=stream)
        for number in range(1, 101):
            progress.feed([step_event(number, 0)])
        lines = stream.getvalue().splitlines()
        assert len(lines) == 11
        assert "100/100" in lines[-1]
        assert "\r" not in stream.getvalue()

    def test_quiet_prints_nothing(self) -> None:
        stream = io.StringIO()
        Progress(1, RunLog(world_size=1), quiet=True, stream=stream).feed([step_event(1, 0)])
        assert stream.getvalue() == ""


class TestTable:
    def summary(self, **changes: Any) -> Summary:
        names = ("test_loss", "test_accuracy", "tokens_per_s", "wall_s")
        figures = {"steps": 5, "loss": 1.5, "step_time_s": 0.02, "samples_per_s": 3200.0}
        sizes = {"bytes_per_step": 2.5e6, "process_bytes": 300_000_000, "held_bytes": 200_000_000}
        identity = {"state": "completed", "strategy": "ring", "world_size": 2}
        return Summary(**{**dict.fromkeys(names), **figures, **sizes, **identity, **changes})

    def test_it_shows_samples_or_tokens_and_a_dash_for_what_is_missing(self) -> None:
        header, row = table(self.summary()).splitlines()
        assert header.split("  ")[0] == "strategy"
        assert "samples/s" in header
        assert " ".join(row.split()) == "ring 2 5 1.5000 - - - 20 ms 3,200 2.5 MB 200 MB 300 MB"
        assert "tokens/s" in table(self.summary(tokens_per_s=1e6))
        assert table(self.summary(mfu=0.31, link_utilization=0.02)).splitlines()[1].endswith("31.0%  2.0%")

    def test_it_says_which_ranks_a_figure_counts(self) -> None:
        header = table(self.summary()).splitlines()[0]
        assert header.endswith(
            "sent per step (all ranks)  peak memory per rank  process memory growth per rank"
        )

    def test_a_run_without_steps_has_a_table_too(self) -> None:
        figures = ("loss", "step_time_s", "samples_per_s", "bytes_per_step", "process_bytes", "strategy")
        assert "-" in table(self.summary(**dict.fromkeys(figures)))

    def test_tables_are_aligned_and_bytes_readable(self) -> None:
        assert aligned(["a", "bb"], [["ccc", "d"]]) == "a    bb\nccc  d"
        assert [human_bytes(n) for n in (12, 1500, 2.5e6, 3e12)] == ["12 B", "1.5 kB", "2.5 MB", "3 TB"]


class TestLab:
    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """As after `pip install`: no checkout, the notebooks inside the package."""
        package = tmp_path / "site/shardscope_widgets"
        (package / "notebooks").mkdir(parents=True)
        tour = {"cells": [], "metadata": {"jupytext": {"formats": "ipynb,py:percent"}, "language_info": {}}}
        (package / "notebooks/01-tour.ipynb").write_text(json.dumps(tour))
        monkeypatch.setattr(lab, "CHECKOUT", tmp_path / "nowhere")
        monkeypatch.setattr(lab, "files", lambda _name: package)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_a_checkout_opens_its_own_notebooks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "notebooks").mkdir()
        (tmp_path / "notebooks/01-tour.ipynb").touch()
        monkeypatch.setattr(lab, "CHECKOUT", tmp_path)
        assert lab.prepare(None) == tmp_path / "notebooks"

    def test_an_installed_package_copies_them_out_without_a_script_that_is_saved_beside_them(
        self, installed: Path
    ) -> None:
        folder = lab.prepare(None)
        assert folder == installed / "shardscope-notebooks"
        copied = json.loads((folder / "01-tour.ipynb").read_text())
        assert copied == {"cells": [], "metadata": {"language_info": {}}}

    def test_what_the_reader_changed_is_never_overwritten(self, installed: Path) -> None:
        (lab.prepare(Path("mine")) / "01-tour.ipynb").write_text("my notes")
        assert (lab.prepare(Path("mine")) / "01-tour.ipynb").read_text() == "my notes"

    def test_a_folder_that_cannot_be_written_is_named(self, installed: Path) -> None:
        (installed / "file").touch()
        with pytest.raises(LaunchError, match="cannot be written"):
            lab.prepare(Path("file/below"))

    def test_the_server_listens_on_this_machine_only(self, tmp_path: Path) -> None:
        command = lab.lab_command(tmp_path, port=8899, browser=False)
        assert command[:4] == [sys.executable, "-P", "-m", "jupyterlab"]
        assert {"--ServerApp.ip=127.0.0.1", "--ServerApp.port=8899", "--no-browser"} <= set(command)


def test_the_demo_gets_every_word_that_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("demo", "--steps", "5", "-q", "out").rest == ["--steps", "5", "-q", "out"]


@pytest.mark.slow
def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_runs_says_so_when_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs"]) == 0
    assert "no runs yet" in capsys.readouterr().out


def test_a_second_interrupt_kills() -> None:
    class Stubborn:
        graces: ClassVar[list[float]] = []

        def stop(self, grace_s: float = 5.0) -> None:
            self.graces.append(grace_s)
            if grace_s:
                raise KeyboardInterrupt

    stop(Stubborn())
    assert Stubborn.graces == [5.0, 0.0]


class TestRealRuns:
    def test_run_trains_and_prints_a_table(self, runs_root: Path) -> None:
        process = start(*TINY)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert out.splitlines()[0].split()[:3] == ["strategy", "ranks", "steps"]
        assert out.splitlines()[1].split()[:3] == ["ring", "2", "5"]
        assert "5/5" in err
        assert Path(out.splitlines()[-1]).parent == runs_root

    def test_json_goes_to_stdout_alone_and_runs_lists_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*TINY, "--json"]) == 0
        printed = capsys.readouterr()
        result = json.loads(printed.out)
        assert (result["state"], result["steps"]) == ("completed", 5)
        assert result["bytes_per_step"] > 0
        assert printed.err == ""
        assert cli.main(["runs", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [run["id"] for run in listed] == [result["id"]]

    @pytest.mark.sampled
    @pytest.mark.slow
    @pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupt_stops_the_run_and_leaves_its_record(
        self, sent: signal.Signals, status: int, runs_root: Path
    ) -> None:
        process = start(*TINY[:-1], "100000")
        wait_for_steps(runs_root)
        os.kill(process.pid, sent)
        _, err = process.communicate(timeout=240)
        assert process.returncode == status, err
        assert "stopped; the run's records are in" in err
        (directory,) = runs_root.iterdir()
        assert json.loads((directory / "status.json").read_text())["state"] == "stopped"

    @pytest.mark.slow
    def test_stop_ends_a_run_of_another_process(
        self, runs_root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        process = start(*TINY[:-1], "100000")
        wait_for_steps(runs_root)
        (directory,) = runs_root.iterdir()
        assert cli.main(["stop", directory.name]) == 0
        assert capsys.readouterr().out == f"{directory.name}: stopped\n"
        process.communicate(timeout=240)
