"""Populations of real runs: trained, scored, cloned, killed at any moment and gone on with."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

import shardscope as ss
from conformance.runs import small_job, wait_for
from shardscope.runlog.writer import encode
from shardscope.tuning.population import PopulationError
from shardscope.tuning.population import driver as driver_module
from shardscope.tuning.population.journal import Journal, Outcome, outcome_line

QUIET = ss.Record(spans_first=0, spans_every=10**6, memory_first=0, memory_every=None)
DRIVER = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from tuning.population.test_population import lines_of, short, under_way
folder = Path({folder!r})
def kill():  # by itself: while this process is held up it cannot get ahead of its end either
    while len(lines_of(folder, "outcome")) < 4 or not under_way(folder):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
short(folder)
"""


def job_of(**changes: Any) -> ss.Job:
    fields: dict[str, Any] = {"strategy": "single", "world_size": 1, "steps": 6, "batch": 32, "record": QUIET}
    return small_job(**{**fields, **changes})


def short(folder: str | Path, **changes: Any) -> ss.Population:
    """Three members, two intervals of three steps, on one rank each."""
    fields: dict[str, Any] = {"members": 3, "intervals": 2, "quantile": 0.34, "folder": folder}
    space = {"optimizer.lr": (1e-5, 1e-1, "log"), "batch": (16, 64, "log2")}
    return ss.train_population(job_of(), **{**fields, **changes, "space": changes.get("space", space)})


def told(population: ss.Population) -> list[Any]:
    """All that must not depend on how often the driver was killed: everything but the runs' names."""
    course = population.course
    outcomes = [(key, o.scores, o.failure, o.samples, o.notes) for key, o in sorted(course.outcomes.items())]
    return [course.plan, course.moves, outcomes]


@pytest.mark.slow
def test_killed_in_its_midst_it_ends_as_if_it_never_had_been(tmp_path: Path) -> None:
    """A driver is killed by SIGKILL while a run is under way; nothing is lost, and nothing counted twice."""
    whole, folder = short(tmp_path / "whole"), tmp_path / "killed"
    code = DRIVER.format(tests=str(Path(__file__).parents[2]), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], start_new_session=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    assert ss.Population(folder).state == "interrupted"
    assert len(lines_of(folder, "outcome")) < 6, "it was killed in its midst"
    again = short(folder)
    assert again.state == "completed"
    assert told(again) == told(whole)
    keys = [(line["interval"], line["member"]) for line in lines_of(folder, "outcome")]
    assert keys == [(interval, member) for interval in (1, 2) for member in range(3)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert_runs_that_completed_count(folder, whole)


def assert_runs_that_completed_count(folder: Path, whole: ss.Population) -> None:
    """As if it had been killed after the last two runs and before it said so: they are not trained again."""
    journal, runs = folder / "journal.jsonl", sorted(folder.glob("runs/*/*/*"))
    before, whole_lines = journal.read_bytes(), journal.read_bytes().splitlines(keepends=True)
    short(folder)
    assert journal.read_bytes() == before, "it is over: nothing is left to do"
    kept = [line for line in whole_lines if b'"completed"' not in line]
    lost = [line for line in kept if b'"outcome"' in line][-2:]
    journal.write_bytes(b"".join(line for line in kept if line not in lost))
    again = short(folder)
    assert told(again) == told(whole)
    assert sorted(folder.glob("runs/*/*/*")) == runs


def under_way(folder: Path) -> bool:
    """Whether ranks of a run have begun that has no outcome yet."""
    counted = {line["run"] for line in lines_of(folder, "outcome")}
    begun = {str(path.parent.relative_to(folder)) for path in folder.glob("runs/*/*/*/rank-0.jsonl")}
    return bool(begun - counted)


class Killed(BaseException):
    """In the place of a SIGKILL, at a point that is known."""


@pytest.mark.parametrize("written", [0.0, 0.5, 1.0], ids=["before", "torn", "after"])
def test_killed_at_any_line_it_ends_as_if_it_never_had_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: float
) -> None:
    """Every line of the journal is the last one that is written, not at all, in half, or whole; runs are made up."""
    monkeypatch.setattr(driver_module.PopulationDriver, "run", made_up)
    monkeypatch.setattr(driver_module.Run, "attach", lambda path: path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    changes = {"members": 4, "intervals": 3}
    whole = short(tmp_path / "whole", **changes)
    append, write = Journal.append, os.write
    num_lines = len((tmp_path / "whole/journal.jsonl").read_text().splitlines())
    for last in range(num_lines):
        countdown = iter([*range(last), -1])

        def dying(journal: Journal, line: Any, countdown: Any = countdown) -> None:
            if next(countdown) >= 0:
                append(journal, line)
                return
            text = encode({"t": 0.0, **line})
            write(journal._file, text[: int(written * len(text))])
            raise Killed

        folder = tmp_path / f"{last}"
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", dying)
            with pytest.raises(Killed):
                short(folder, **changes)
        again = short(folder, **changes)
        assert again.state == "completed"
        assert told(again) == told(whole)
        outcomes = [(line["interval"], line["member"]) for line in lines_of(folder, "outcome")]
        assert len(outcomes) == len(set(outcomes)) == 12


def saved(folder: Path) -> set[str]:
    """The runs whose checkpoints are on disk."""
    return {str(path.parents[1].relative_to(folder)) for path in folder.glob("runs/*/*/*/checkpoints/*")}


@pytest.mark.parametrize("dies_at", [None, "moves", "outcome"], ids=["lives", "after moves", "midway"])
def test_only_what_is_gone_on_from_stays_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str | None
) -> None:
    """Whoever goes on from a checkpoint finds it, and a loser's is gone by then, whenever the driver was killed."""
    monkeypatch.setattr(driver_module.Run, "attach", lambda path: path)
    fields = {"members": 4, "intervals": 3, "quantile": 0.25}
    countdown = iter([False, True])

    def saving(driver: Any) -> None:
        parents = [driver._parent_of(move) for move in driver.waiting]
        assert all(parent is None or list((parent / "checkpoints").iterdir()) for parent in parents)
        if parents and driver.interval > 1:
            before = f"interval-{driver.interval - 1:03d}"
            kept = {str(parent.relative_to(tmp_path / "p")) for parent in parents}
            others = {run for run in saved(tmp_path / "p") if before in run} - kept
            assert len(others) <= 4 - len(parents)
        made_up(driver, save=True)

    def dying(driver: Any, line: Any, write: Any = driver_module.PopulationDriver._write) -> None:
        write(driver, line)
        if line["event"] == (dies_at or "") and next(countdown, False):
            raise Killed

    monkeypatch.setattr(driver_module.PopulationDriver, "run", saving)
    monkeypatch.setattr(driver_module.PopulationDriver, "_write", dying)
    if dies_at is not None:
        with pytest.raises(Killed):
            short(tmp_path / "p", **fields)
    population = short(tmp_path / "p", **fields)
    assert saved(population.folder) == {entry.outcome.run for entry in population.front}


def made_up(driver: Any, *, save: bool = False) -> None:
    """Outcomes that follow from settings alone; one in five fails."""
    assert driver.parallel == 1
    assert not driver.stop_request.exists()
    for move in driver.waiting:
        where = (driver.interval, move.member)
        score = Random(f"{where} {move.settings}").random()
        failed = score < 0.2
        run = f"runs/interval-{driver.interval:03d}/{move.member}/run"
        if save:
            (driver.folder / run / "checkpoints" / "step-3").mkdir(parents=True)
        scores = None if failed else {"loss": score}
        driver._write(outcome_line(Outcome(*where, run, scores, "it failed" if failed else None, 7)))


def lines_of(folder: Path, event: str) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    whole = path.read_bytes() if path.is_file() else b""
    found = []
    for line in whole[: whole.rfind(b"\n") + 1].splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if line["event"] == event]


def test_a_clone_goes_on_from_its_parents_weights_moments_and_data(tmp_path: Path) -> None:
    population = short(tmp_path / "p", members=2, intervals=2, quantile=0.5)
    first, second = population.entries()[:2], population.entries()[2:]
    (clone,) = [entry for entry in second if entry.move.origin == "cloned"]
    parent = first[clone.move.parent]
    assert clone.move.parent != clone.member
    assert clone.move.before == first[clone.member].move.settings
    assert clone.move.settings != parent.move.settings
    (went_on,) = [event for event in population.run(clone).events("resume") if event["rank"] == 0]
    assert went_on["step"] == 3
    assert went_on["samples"] == 3 * parent.move.settings["batch"]
    assert clone.outcome.samples == 3 * parent.move.settings["batch"] + 3 * clone.move.settings["batch"]
    lineage, schedule = population.lineage(), population.schedule(clone)
    assert list(schedule["member"]) == [parent.member, clone.member]
    assert list(schedule["batch"]) == [parent.move.settings["batch"], clone.move.settings["batch"]]
    assert list(schedule["to_step"]) == [3, 6]
    assert len(lineage) == 4
    assert lineage["parent"].isna().sum() == 2
    losses = {entry.member: entry.outcome.scores["loss"] for entry in second}
    assert population.best.member == min(losses, key=losses.get)
    assert population.best.outcome.scores["loss"] == population.run(population.best).summary().validation_loss
    assert saved(population.folder) == {population.best.outcome.run}


def test_spaces_and_objectives_are_those_of_studies(tmp_path: Path) -> None:
    space = {
        "optimizer": ["adamw", "lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log"), "warmup": (0.0, 0.3),
        "batch": (16, 64, "log2"),
    }  # fmt: skip
    objectives = {
        "error": None,
        "seconds": None,
        "bytes": None,
        "memory": None,
        "mine": lambda run: run.job.last_step,
    }
    population = short(tmp_path / "p", members=2, intervals=1, space=space, objectives=objectives)
    for entry in population.entries():
        summary = population.run(entry).summary()
        scores = entry.outcome.scores
        assert list(scores) == list(objectives)
        assert scores["error"] == pytest.approx(1 - summary.validation_accuracy)
        assert scores["seconds"] == pytest.approx(summary.step_time_s, rel=1e-6)
        assert scores["bytes"] == summary.bytes_per_step
        assert scores["memory"] > 0
        assert scores["mine"] == 6
        assert ("optimizer[lamb].lr" in entry.move.settings) == (entry.move.settings["optimizer"] == "lamb")


@pytest.mark.slow
def test_members_that_fail_are_said_and_replaced(tmp_path: Path) -> None:
    """A learning rate without measure ends in NaN."""
    population = short(
        tmp_path / "p", members=3, intervals=2, seed=3,
        space={"optimizer": [ss.Optimizer("sgd", lr=1e30), ss.Optimizer("sgd", lr=0.1)]},
    )  # fmt: skip
    first, second = population.entries()[:3], population.entries()[3:]
    failed = [entry for entry in first if entry.outcome.failure]
    assert failed
    assert len(failed) < 3
    for entry in failed:
        assert entry.outcome.scores is None
        assert entry.outcome.failure.startswith(
            f"member {entry.member} failed in interval 1 and counts as the worst: "
        )
        assert "the loss became" in entry.outcome.failure
        assert "\n" not in entry.outcome.failure
        assert second[entry.member].move.origin == "cloned"
        assert first[second[entry.member].move.parent].outcome.failure is None
    assert population.best.outcome.failure is None


def test_if_all_fail_it_says_so_and_ends(tmp_path: Path) -> None:
    with pytest.raises(
        PopulationError, match="all 2 members failed in interval 1; the first: member 0 failed"
    ):
        short(tmp_path / "p", members=2, space={"optimizer": [ss.Optimizer("sgd", lr=1e30)]})
    assert ss.Population(tmp_path / "p").state == "failed"


def test_stops_when_asked_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    trained: list[ss.Population] = []
    launch, is_asked = driver_module.launch, threading.Event()

    def launch_in_time(*arguments: Any, **options: Any) -> ss.Run:
        if lines_of(folder, "outcome"):
            is_asked.wait(120)  # else all could have ended before
        return launch(*arguments, **options)

    monkeypatch.setattr(driver_module, "launch", launch_in_time)
    driver = threading.Thread(target=lambda: trained.append(short(folder, members=2, intervals=2)))
    driver.start()
    wait_for(lambda: lines_of(folder, "outcome"))
    with pytest.raises(PopulationError, match="is being trained by another process"):
        short(folder, members=2, intervals=2)
    assert ss.Population(folder).state == "running"
    ss.Population(folder).stop()
    is_asked.set()
    driver.join(timeout=120)
    assert not driver.is_alive()
    assert trained[0].state == "stopped"
    assert not any(run.is_alive for home in folder.glob("runs/*/*") for run in ss.runs(home))
    with pytest.raises(
        PopulationError, match="was created with members=2, not 3; resume with the original value"
    ):
        short(folder, members=3, intervals=2)
    space = {"optimizer.lr": (1e-5, 1.0, "log"), "batch": (16, 64, "log2")}
    with pytest.raises(PopulationError, match=r"was created with space\['optimizer.lr'\]="):
        short(folder, members=2, intervals=2, space=space)
    assert short(folder, members=2, intervals=2).state == "completed"


@pytest.mark.slow
def test_several_objectives_make_a_front_and_what_a_clone_drops_is_said(tmp_path: Path) -> None:
    space = {"compression": ["none", ss.Compression("topk", ratio=0.1)], "optimizer.lr": (1e-3, 1e-2, "log")}
    population = ss.train_population(
        job_of(strategy="ring", world_size=2), space, members=3, intervals=2, objectives=("loss", "bytes"),
        resample=1.0, seed=78, at_once=2, folder=tmp_path / "p",
    )  # fmt: skip
    first, second = population.entries()[:3], population.entries()[3:]
    (clone,) = [entry for entry in second if entry.move.origin == "cloned"]
    parent = first[clone.move.parent]
    assert parent.move.settings["compression"] == {"name": "topk", "ratio": 0.1}
    assert clone.move.settings["compression"] == "none"
    assert clone.outcome.notes == (
        "dropped compressor state (residual): the compression method is no longer topk",
    )
    assert list(population.lineage()["notes"])[3 + clone.member] == f"{clone.outcome.notes[0]}."
    scores = {entry.member: entry.outcome.scores for entry in second}
    assert all(set(score) == {"loss", "bytes"} for score in scores.values())
    front = {entry.member for entry in population.front}
    for member, score in scores.items():
        beaten = any(
            other["loss"] <= score["loss"] and other["bytes"] <= score["bytes"] and other != score
            for other in scores.values()
        )
        assert (member in front) != beaten


class Halving:
    """A space of another kind than ranges."""

    def draw(self, job: ss.Job, random: Random) -> dict[str, Any]:
        return {"rate": random.choice([0.1, 0.2, 0.4, 0.8])}

    def explore(
        self,
        job: ss.Job,
        settings: Any,
        random: Random,
        *,
        resample: float,
    ) -> dict[str, Any]:
        return {"rate": settings["rate"] / 2}

    def apply(self, job: ss.Job, settings: Any) -> ss.Job:
        return job.replace(optimizer=ss.Optimizer("sgd", lr=settings["rate"]))

    def describe(self) -> dict[str, Any]:
        return {"rates": 4}


def test_any_space_that_can_be_explored_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module.PopulationDriver, "run", made_up)
    monkeypatch.setattr(driver_module.Run, "attach", lambda path: path)
    population = short(tmp_path / "p", members=8, intervals=4, interval_steps=1, space=Halving(), seed=2)
    clones = [entry for entry in population.entries() if entry.move.origin == "cloned"]
    before = {(entry.interval, entry.member): entry.move.settings["rate"] for entry in population.entries()}
    assert clones
    for clone in clones:
        assert clone.move.settings["rate"] == before[clone.interval - 1, clone.move.parent] / 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"members": 1}, "members=1 is too few; use at least 2"),
        ({"objectives": "speed"}, "objective='speed' is not known"),
        ({"objectives": ()}, r"objectives=\(\) is empty"),
        ({"objectives": "seconds"}, "contain no measure of quality"),
        ({"objectives": ("loss", "loss")}, "contain a duplicate"),
        ({"space": {"seed": [1, 2]}}, "cannot change while a member trains"),
        ({"space": {"optimizer[lion].lr": (0.1, 1.0)}}, "'lion' is not known"),
        ({"quantile": 0.9}, "quantile=0.9 is not a valid fraction"),
        ({"resample": 2.0}, "resample=2.0 is not a probability"),
        ({"intervals": 50}, "leaves no steps for an interval"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ss.SpecError, match=words):
        short(tmp_path / "p", **changes)
    assert not (tmp_path / "p").exists()
    assert os.listdir(tmp_path) == []
