"""The batches of a study that is told no space: what they are centred on, and that this is measured once."""

from __future__ import annotations

import math
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from optuna import Study, create_study
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import create_trial

import shardscope as ss
from shardscope.errors import SpecError, StudyError
from shardscope.runtime import runs
from shardscope.spec import Job
from shardscope.tuning import noise_probe
from shardscope.tuning import session as session_module
from shardscope.tuning.batch_range import BatchRange, around
from shardscope.tuning.definition import Definition
from shardscope.tuning.noise_probe import measured, probe_of
from shardscope.tuning.priors import default_space
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import begun_as, create_or_load, folder_of, open_storage

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=64)


class TestAround:
    @pytest.mark.parametrize(
        ("centre", "batches"),
        [
            (None, (16, 256)),
            (64.0, (16, 256)),
            (100.0, (32, 512)),
            (90.0, (16, 256)),  # nearer to 64 than to 128, as logarithms go
            (32.0, (8, 128)),
            (1.5, (8, 64)),  # not below an eighth of the job's: its samples would last for eight times the steps
            (1e6, (64, 512)),  # at most what leaves eight steps
        ],
    )  # fmt: skip
    def test_two_powers_either_side_as_far_as_steps_go(
        self, centre: float | None, batches: tuple[int, int]
    ) -> None:
        found = around(JOB, centre)
        assert found is not None
        assert (found.low, found.high) == batches

    @pytest.mark.parametrize("centre", [0.1, 3.0, 64.0, 700.0, 1e9])
    @pytest.mark.parametrize("job", [JOB, JOB.replace(steps=3), JOB.replace(world_size=4, batch=256)])
    def test_the_jobs_own_is_always_among_them(self, job: Job, centre: float) -> None:
        found = around(job, centre)
        assert found is not None
        assert found.low <= job.batch.global_batch <= found.high

    def test_ranks_and_memory_cut_it(self) -> None:
        eight = around(JOB.replace(world_size=8), 16.0)
        assert eight is not None
        assert (eight.low, eight.high) == (8, 64)
        assert around(JOB.replace(world_size=3, batch=96), 96.0) is None  # three ranks share no power of two
        small = around(JOB, 128.0, fits=lambda job: job.batch.global_batch <= 128)
        assert small is not None
        assert (small.low, small.high) == (32, 128)

    def test_a_batch_that_is_no_power_of_two_lies_inside(self) -> None:
        found = around(JOB.replace(batch=96), 1e6)
        assert found is not None
        assert (found.low, found.high) == (64, 512)


def test_what_is_said_of_a_range_names_its_centre_or_why_there_is_none() -> None:
    figure = BatchRange(own=64, critical=84.6, low=61.2, high=None, steps=32)
    assert figure.sentence(ss.PowersOfTwo(16, 256)) == (
        "Batch sizes 16 to 256, around the critical batch size 84.6 (95% interval: 61.2 to infinity), from the "
        "gradient noise scale of 32 steps."
    )
    assert "as close as possible to" in figure.sentence(ss.PowersOfTwo(16, 64))
    assert (
        BatchRange(own=64).sentence(ss.PowersOfTwo(16, 64))
        == "Batch sizes 16 to 64, around the job's own 64."
    )


@pytest.mark.slow
def test_a_study_without_a_space_measures_the_noise_scale_once_and_keeps_it() -> None:
    ss.tune(JOB, trials=1, name="noise")
    session = StudySession.open(name="noise")
    found, batches = session.definition.batch_range, session.definition.space.parameters["batch"]
    assert found is not None
    assert found.critical is not None
    plain = ss.launch(JOB.replace(record=ss.Record(noise_scale=True)))
    plain.wait()
    assert found.critical == pytest.approx(plain.noise_scale(0.95).critical_batch[31], rel=1e-4)
    assert found.steps == 32
    assert batches == around(JOB, found.critical)
    assert batches.low <= 2 ** round(math.log2(found.critical)) <= batches.high
    assert found.run is not None
    assert ss.Run.attach(found.run).job == probe_of(JOB)
    assert len(session.records()) == 1 + sum(record.state == "unused" for record in session.records())
    assert session.report().batches == found.sentence(batches)
    assert str(session.report().batches) in str(session.report())
    again = StudySession.open(JOB, trials=2, name="noise")
    spelt_out = StudySession.open(JOB, session.definition.space, name="noise")
    assert again.definition == spelt_out.definition == session.definition
    assert len(runs(session.folder / "probe")) == 1


@pytest.mark.slow
def test_a_study_whose_maker_died_after_measuring_does_not_measure_again(tmp_path: Path) -> None:
    job = JOB.replace(checkpoint=ss.Checkpoint(every=1))
    first = measured(job, tmp_path)
    assert measured(job, tmp_path) == first
    assert len(runs(tmp_path)) == 1
    assert not list(tmp_path.glob("*/checkpoints/*")), "nobody goes on from it"
    assert measured(JOB.replace(seed=1), tmp_path).critical != first.critical


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("job", "why"),
    [
        (JOB.replace(strategy="gossip"), "cannot be combined with strategy='gossip', where"),
        (
            JOB.replace(compression="local-sgd"),
            "cannot be combined with compression='local-sgd', where each rank",
        ),
        (
            JOB.replace(strategy="single", world_size=1),
            "but a single rank with batch.micro_batch=64 has only one",
        ),
    ],
)
def test_where_it_cannot_be_measured_the_study_says_so_and_runs_nothing(job: Job, why: str) -> None:
    session = StudySession.open(job, name="cannot")
    said = session.report().batches
    assert said is not None
    assert why in said
    assert said.startswith(
        "Batch sizes 16 to 256, around the job's own 64, because measuring the gradient noise"
    )
    assert not runs(session.folder / "probe")


def test_a_run_that_fails_leaves_the_jobs_own_batch_and_its_sentence(tmp_path: Path) -> None:
    found = measured(JOB.replace(optimizer=ss.Optimizer("sgd", lr=1e30)), tmp_path)
    assert found.critical is None
    assert "the run that should have measured the noise scale failed: " in str(found.why_not)
    assert "\n" not in str(found.why_not)


def test_it_is_given_up_when_asked_to_stop_and_leaves_no_run_behind(tmp_path: Path) -> None:
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(
        StudyError, match="stopped while the noise scale was being measured, before the study was created"
    ):
        measured(JOB.replace(steps=100_000), tmp_path, stopping)
    assert [run.is_alive for run in runs(tmp_path)] == [False]


def test_the_time_of_a_study_counts_from_before_it_is_measured() -> None:
    began = time.monotonic()
    with pytest.raises(StudyError, match="stopped while the noise scale was being measured"):
        ss.tune(
            JOB.replace(steps=100_000, link=ss.Link(bandwidth="1 Gbit/s", latency="50 ms")),
            name="late",
            timeout_s=0.5,
        )
    assert time.monotonic() - began < 200  # to the end it would take more than an hour
    assert begun_as(open_storage(None, "late"), "late") is None


def test_around_the_jobs_own_where_asked_and_a_space_of_ones_own_stays_as_it_is() -> None:
    session = StudySession.open(JOB, name="own", batch_range="job")
    assert session.report().batches == "Batch sizes 16 to 256, around the job's own 64."
    assert not (session.folder / "probe").exists()
    given = StudySession.open(JOB, {"batch": ss.PowersOfTwo(32, 64)}, name="given")
    assert given.report().batches is None
    with pytest.raises(SpecError, match="did you mean 'noise'"):
        ss.tune(JOB, batch_range="nose")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_job_with_code_of_ones_own_keeps_it_when_the_study_goes_on() -> None:
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        data="digits",
        steps=20,
    )
    first = StudySession.open(job, name="code")
    again = StudySession.open(job, name="code")
    assert first.definition.job is again.definition.job is job
    assert again.definition.batch_range == first.definition.batch_range
    assert first.definition.batch_range is not None
    assert first.definition.batch_range.critical is not None


@pytest.mark.slow
def test_of_drivers_that_begin_together_with_other_ranges_all_take_that_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_is_first(
        storage: BaseStorage, name: str, mine: Definition, sampler: BaseSampler
    ) -> tuple[Study, bool]:
        theirs = mine.centred(ss.PowersOfTwo(32, 64), BatchRange(own=64, critical=32.0, low=1.0))
        create_or_load(storage, name, theirs, sampler)
        return create_or_load(storage, name, mine, sampler)

    monkeypatch.setattr(session_module, "create_or_load", other_is_first)
    definition = StudySession.open(JOB, name="raced", batch_range="job", baselines=False).definition
    assert definition == StudySession.open(name="raced").definition
    assert definition.space.parameters["batch"] == ss.PowersOfTwo(32, 64)
    with pytest.raises(StudyError, match="the space has changed in batch"):
        StudySession.open(JOB, {**default_space(JOB).parameters}, name="raced", baselines=False)


@pytest.mark.slow
def test_one_that_finds_the_study_begun_once_it_has_measured_takes_its_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meanwhile(job: Job, *rest: object) -> BatchRange:
        StudySession.open(job, name="meanwhile", batch_range="job")
        return BatchRange(own=64, critical=16.0, low=1.0)

    monkeypatch.setattr(noise_probe, "measured", meanwhile)
    assert StudySession.open(JOB, name="meanwhile").definition.batch_range == BatchRange(own=64)


def test_a_study_that_something_else_began_is_refused_before_anything_is_measured() -> None:
    study = create_study(storage=open_storage(None, "foreign"), study_name="foreign", directions=["minimize"])
    study.add_trial(create_trial(value=1.0))
    with pytest.raises(StudyError, match="another program created it"):
        StudySession.open(JOB, name="foreign")
    assert not runs(folder_of("foreign") / "probe")


@pytest.mark.slow
def test_a_study_goes_on_with_its_range_where_its_first_run_is_gone() -> None:
    first = StudySession.open(JOB, name="gone")
    shutil.rmtree(first.folder / "probe")
    assert StudySession.open(JOB, name="gone").definition == first.definition
