"""The interval between checkpoints: as stated, or chosen from what a save costs and how often the job fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from conformance.alone import Never, trainer_in
from shardscope.errors import SpecError
from shardscope.training.checkpoint import writing
from shardscope.training.run_checkpoints import CheckpointInterval


def test_the_interval_is_dalys_for_the_measured_cost() -> None:
    interval = CheckpointInterval(ss.Checkpoint(every="auto", mtbf_s="1 h"))
    due = [step for step in range(1, 8) if interval.is_due(step, 9.9 if step == 1 else 0.5)]
    assert due == [5, 6, 7], "due until it is saved"
    assert interval.measured(2.0) == (2.0, 0.5)
    every = interval.choose(5, save_s=2.0, step_s=0.5)
    said = ss.analytic.reliability.daly_interval_s(save_s=2.0, mtbf_s=3600)
    assert every == round(float(said) / 0.5) == 237
    assert not interval.is_due(5 + every - 1, 0.5)
    assert interval.is_due(5 + every, 0.5)


def test_a_run_measures_its_first_save_and_goes_on_at_that_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.os, "fsync", lambda _: None)  # saves many times
    trainer = trainer_in(tmp_path, steps=12, checkpoint=ss.Checkpoint(every="auto", mtbf_s=0.01, keep=100))
    trainer.train(Never())
    events = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    chosen = [event for event in events if event["event"] == "checkpoint_interval"]
    assert saved[0] == 5
    assert [event["step"] for event in chosen] == saved
    assert [event["step"] + event["every"] for event in chosen[:-1]] == saved[1:]
    assert chosen[-1]["step"] + chosen[-1]["every"] > 12
    for event in chosen:
        said = ss.analytic.reliability.daly_interval_s(save_s=event["save_s"], mtbf_s=0.01)
        assert event["every"] == max(1, round(float(said) / event["step_s"]))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"every": 0}, "every=0 is not valid: give a number of steps, 1 to 2147483647, or 'auto'"),
        ({"every": "often"}, "every='often' is not valid"),
        ({"every": 2.5}, "every=2.5 is not valid"),
        ({"every": "auto"}, "every='auto' needs the mean time between failures.* such as mtbf_s='6 h'"),
        ({"every": 5, "mtbf_s": 60}, "mtbf_s=60 has no effect with every=5; give every='auto'"),
        ({"every": "auto", "mtbf_s": "6"}, "mtbf_s='6' has no unit"),
    ],
)
def test_what_is_no_interval_is_refused_in_a_sentence(fields: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ss.Checkpoint(**fields)


def test_an_interval_is_read_from_the_command_line_and_from_json() -> None:
    assert ss.Checkpoint(every="12").every == 12
    chosen = ss.Checkpoint(every="auto", mtbf_s="6 h")
    assert ss.Checkpoint.from_json(chosen.to_json()) == chosen
    assert chosen.mtbf_s == 6 * 3600
