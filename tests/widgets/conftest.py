"""Labs that are closed after the test; a Training Lab over runs that never ran, which come from memory."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.runtime.emulated.launching import as_launched
from shardscope.runtime.record.listing import Skipped
from widgets.fake_runs import FakeRun, start_event


class FakeRuntime:
    def __init__(self) -> None:
        self.known: list[FakeRun] = []
        self.skipped: list[Skipped] = []

    def runs(self, root=None, *, all=False):  # noqa: A002
        from shardscope.runtime import Runs

        kept = [run for run in self.known if not run.is_deleted and (all or run.made_by is None)]
        return Runs(reversed(kept), self.skipped)

    def launch(self, job, cluster=None, root=None, preflight=True, group=None, resume=None):
        ranks = [start_event(job.strategy.name, job.world_size, rank) for rank in range(job.world_size)]
        job = job if cluster is None else as_launched(job)
        run_id = f"{len(self.known):03d}-{job.label}"
        self.known.append(FakeRun(run_id, job, ranks, state="running", title=job.label))
        self.known[-1].group, self.known[-1].cluster = group or self.known[-1].group, cluster
        return self.known[-1]


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    assert callable(ss.runs)  # names that are loaded when they are first used must not keep the fakes
    assert callable(ss.launch)
    assert callable(ss.accuracy)  # its module has a name of its own for `runs`
    monkeypatch.setattr("shardscope.runtime.runs", fake.runs)
    monkeypatch.setattr("shardscope.runtime.launch", fake.launch)
    monkeypatch.setattr("shardscope.runtime.emulated.why_not_emulated", lambda: "these runs never run")
    return fake


@pytest.fixture
def make_lab(runtime):
    from shardscope_widgets import TrainingLab

    labs = []

    def make(**choices):
        labs.append(TrainingLab(**choices))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


@pytest.fixture
def lab(make_lab):
    return make_lab()


@pytest.fixture
def make_tuning_lab():
    """Of real studies."""
    from shardscope_widgets import TuningLab

    labs = []

    def make(*args, **choices):
        labs.append(TuningLab(*args, **choices))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()
        assert lab._engine.wait(120)
