"""The JSON of a job has a version: newer ones are refused in a sentence, and a new field hides no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.spec.job_format import FORMAT

JOB = ss.Job(
    model="mlp", data="digits", strategy="zero-1", optimizer="lamb", compression="none", batch=ss.Batch(32)
)


def written(**changes: Any) -> dict[str, Any]:
    return {**json.loads(JOB.to_json()), **changes}


def newer() -> dict[str, Any]:
    """The job as a newer version might write it, with fields that this one does not have."""
    fields = written(gravity=9.81)
    fields["batch"]["bucket"] = True
    fields["optimizer"]["phase"] = 3
    fields["strategy"]["moon"] = "full"
    return fields


LEFT_OUT = {"Job.gravity", "Batch.bucket", "Lamb.phase", "Zero1.moon"}


def test_the_json_of_a_job_names_its_format_and_json_without_one_is_read() -> None:
    assert written()["format"] == FORMAT
    assert ss.Job.from_json(JOB.to_json()) == JOB
    fields = written()
    del fields["format"]
    assert ss.Job.from_json(json.dumps(fields)) == JOB


@pytest.mark.parametrize("read", [ss.Job.from_json, ss.Job.from_history])
def test_a_newer_format_is_refused_in_a_sentence_that_names_both_versions(read: Any) -> None:
    said = f"format {FORMAT + 1}, but shardscope {ss.__version__} reads formats up to {FORMAT}; update shardscope"
    with pytest.raises(ss.SpecError, match=said):
        read(json.dumps({**written(format=FORMAT + 1), "gravity": 9.81}))


@pytest.mark.parametrize("version", ["1", None, True, 0, 1.5])
def test_a_format_that_is_not_a_version_is_refused(version: Any) -> None:
    with pytest.raises(ss.SpecError, match="is not a format version of a job's JSON"):
        ss.Job.from_json(json.dumps(written(format=version)))


def test_fields_of_a_newer_version_are_left_out_of_history_and_refused_elsewhere() -> None:
    text = json.dumps(newer())
    with pytest.raises(ss.SpecError, match="moon"):
        ss.Job.from_json(text)
    job = ss.Job.from_history(text)
    assert set(job.left_out) == LEFT_OUT
    assert job.replace(steps=3).optimizer == JOB.optimizer
    with pytest.raises(
        ss.SpecError, match=r"newer version of shardscope, and .*Lamb\.phase.* update shardscope"
    ):
        ss.launch(job.replace(steps=3), preflight=False)
    with pytest.raises(ss.SpecError, match="moon"):  # and nothing of it lasts
        ss.Job.from_json(text)


def test_a_run_of_a_newer_version_is_listed_and_says_what_was_left_out(runs_root: Path) -> None:
    folder = runs_root / "newer"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(newer()))
    (run,) = ss.runs()
    assert (run.job.batch, run.job.strategy.name) == (JOB.batch, "zero-1")
    (problem,) = run.problems
    assert problem.startswith("job.json has fields from a newer version, which are ignored: ")
    with pytest.raises(ss.SpecError, match="update shardscope to run it"):
        ss.launch(ss.load_job(run), preflight=False)
    (folder / "job.json").write_text(json.dumps(written(format=FORMAT + 1)))
    assert f"shardscope {ss.__version__} reads formats up to {FORMAT}" in ss.runs().note
