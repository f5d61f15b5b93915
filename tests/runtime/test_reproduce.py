"""A run launched again has the same losses to the bit, and says how its environment differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.damage import recorded_run
from conformance.runs import small_job
from shardscope import cli
from shardscope.runtime.record import code_file
from shardscope.runtime.record.provenance import FILE
from shardscope.runtime.tools import reproduce
from shardscope.runtime.tools.reproduce import first_difference


@pytest.fixture(autouse=True)
def outside_of_any_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the state of this checkout is no difference."""
    monkeypatch.chdir(tmp_path)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10))


def edit(file: Path, change: Any) -> None:
    """Change the JSON objects in a file, one a line."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_a_run_launched_again_has_the_same_losses_to_the_bit_and_nothing_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = small_job(model=linear, strategy="ring", world_size=2, steps=4, seed=7, compression="qsgd")
    run = ss.launch(job).wait(100)
    again = ss.reproduce(run.id).wait(100)
    assert again.id != run.id
    assert again.summary().steps == 4
    assert first_difference(run, again) is None
    other = ss.launch(job.replace(seed=8)).wait(100)
    assert first_difference(run, other) == 1
    monkeypatch.setattr(code_file, "_written_here", set())  # as in another process
    with pytest.raises(ss.errors.UntrustedCode, match="trust_code=True"):
        ss.reproduce(run)


@pytest.mark.slow
def test_the_command_says_from_which_step_on_losses_differ(capsys: pytest.CaptureFixture[str]) -> None:
    run = ss.launch(small_job(steps=3)).wait(100)
    assert cli.main(["reproduce", run.id]) == 0
    assert "the losses are bit-identical" in capsys.readouterr().out

    def change(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] > 1:
            event["loss"] += 1e-15

    edit(run.path / "rank-1.jsonl", change)
    assert cli.main(["reproduce", run.id, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["first_difference"], told["environment"]) == (2, [])


def test_the_command_launches_as_the_function_does(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each difference is a line on stderr, not also a warning."""
    asked: list[tuple[str, bool]] = []

    def called(run: ss.Run, *, trust_code: bool, root: Path | None) -> ss.Run:
        asked.append((run.id, trust_code))
        return run

    monkeypatch.setattr(reproduce, "reproduce", called)
    earlier = ss.Run.attach(recorded_run(runs_root))
    assert cli.main(["reproduce", earlier.id, "--trust-code"]) == 0
    assert asked == [(earlier.id, True)]
    assert capsys.readouterr().err.startswith("shardscope: its environment was not recorded")


def test_each_difference_of_the_environment_is_warned_of_in_a_line(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[ss.Job] = []
    monkeypatch.setattr(reproduce, "launch", lambda job, cluster, **_: launched.append(job))
    run = ss.Run.attach(recorded_run(runs_root))
    with pytest.warns(reproduce.EnvironmentDiffers, match="its environment was not recorded"):
        ss.reproduce(run)
    here = reproduce.Provenance.here(command=[])
    then = {
        "time": 1.0,
        "versions": {**here.versions, "torch": "1.0"},
        "machine": {**here.machine, "cpu": "Z80"},
    }
    (run.path / FILE).write_text(json.dumps(then))
    with pytest.warns(reproduce.EnvironmentDiffers) as told:
        ss.reproduce(run)
    assert [str(each.message) for each in told] == [
        f"{run.id}: torch was 1.0 and is {here.versions['torch']}",
        f"{run.id}: cpu was Z80 and is {here.machine['cpu']}",
    ]
    assert told[0].filename == __file__
    assert launched == [run.job, run.job]


def test_a_run_that_went_on_from_a_checkpoint_says_that_it_begins_anew(runs_root: Path) -> None:
    path = recorded_run(runs_root)
    resumed = {"event": "resume", "t": 1.0, "rank": 0, "step": 3, "samples": 96, "notes": []}
    with (path / "rank-0.jsonl").open("a") as log:
        log.write(f"{json.dumps(resumed)}\n")
    told = list(reproduce.differences(ss.Run.attach(path)))
    assert told[-1] == "it resumed from step 3 of another run, and is launched again from its first step"


def test_losses_that_are_not_finite_are_equal_to_themselves(runs_root: Path) -> None:
    one, two = (recorded_run(runs_root, name=name) for name in ("one", "two"))

    def explode(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 4:
            event["loss"] = "nan"

    edit(one / "rank-0.jsonl", explode)
    assert first_difference(one, two) == 4
    edit(two / "rank-0.jsonl", explode)
    assert first_difference(one, two) is None
