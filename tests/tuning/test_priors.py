"""What a study knows before its first trial, and what it says in the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.errors import DataError, StudyError
from shardscope.prediction.traced import traced, tracing_together
from shardscope.spec.space import Choices, Space
from shardscope.tuning.apply import MemoryLimit, check, predicted_peak
from shardscope.tuning.definition import Definition
from shardscope.tuning.priors import default_space, seeds, with_baselines
from shardscope.tuning.records import TrialRecord
from shardscope.tuning.report import report_of
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=64)


@pytest.mark.parametrize(
    "strategy", ["ring", "all-reduce", "zero-2", "parameter-server", "gossip", "pipeline"]
)
def test_a_space_that_suits_every_strategy(strategy: str) -> None:
    job = JOB.replace(strategy=strategy)
    space = default_space(job)
    check(job, space)
    assert ("compression" in space.parameters) == (strategy != "pipeline")
    assert {"optimizer", "batch", "warmup"} <= set(space.parameters)


def test_baselines_join_a_space_that_chooses_optimizers_and_no_other() -> None:
    space = with_baselines(
        Space(parameters={"optimizer": ["lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log")})
    )
    chosen = space.parameters["optimizer"]
    assert isinstance(chosen, Choices)
    assert chosen.values == ("lamb", "adamw", "nesterov")
    assert {"optimizer[adamw].lr", "optimizer[nesterov].lr"} < set(space.parameters)
    alone = Space(parameters={"optimizer.lr": (1e-3, 1e-1, "log")})
    assert with_baselines(alone) == alone


def test_seeds_are_the_job_the_baselines_and_lambs_line_over_the_batch() -> None:
    found = seeds(JOB, default_space(JOB))
    assert [seed.origin for seed in found] == ["default", "baseline", "baseline", "prior", "prior", "prior"]
    line = [seed.params for seed in found if seed.origin == "prior"]
    batches = [int(str(params["batch"])) for params in line]
    rates = [float(str(params["optimizer[lamb].lr"])) for params in line]
    assert batches == [256, 64, 16]  # the one of the most steps last
    assert rates[0] / rates[2] == pytest.approx(4.0)  # the root of 16


def test_what_is_called_default_is_the_job_as_it_is() -> None:
    job = JOB.replace(optimizer=ss.Optimizer("adamw", lr=1e-5), compression="sign")
    own = seeds(job, default_space(job))[0]
    assert own.origin == "default"
    assert own.params["optimizer[adamw].lr"] == 1e-5
    assert own.params["compression"] == "sign"
    odd = JOB.replace(batch=96)
    space = Space(parameters={"batch": ss.PowersOfTwo(32, 256), "optimizer.lr": (1e-4, 1e-2, "log")})
    assert [(seed.origin, dict(seed.params)) for seed in seeds(odd, space)] == [
        ("prior", {"optimizer.lr": 1e-3})
    ]


@pytest.mark.slow
def test_an_optimizer_that_never_fits_does_not_use_up_the_others_turns() -> None:
    peak = max(predicted_peak(JOB.replace(optimizer=name)) or 0 for name in ("nesterov", "sgd"))
    space = {"optimizer": ["adamw", "nesterov", "sgd"], "optimizer.lr": (1e-3, 1e-1, "log")}
    ss.tune(JOB.replace(steps=2), space, trials=4, name="fits", memory_limit=peak + 1, pruner="none")
    records = StudySession.open(name="fits").records()
    assert sum(record.counted for record in records) == 4
    assert {record.params["optimizer"] for record in records if record.state == "complete"} == {
        "nesterov",
        "sgd",
    }


def test_only_compressors_that_could_pay_on_the_link_are_tried_first() -> None:
    space = {"compression": ["int8", "topk", "powersgd"]}
    slow = JOB.replace(link=ss.Link(bandwidth="10 Mbit/s", latency="1 us"))
    far = JOB.replace(link=ss.Link(bandwidth="100 Gbit/s", latency="50 ms"))
    priors = [
        {s.params["compression"] for s in seeds(job, Space(parameters=space)) if s.origin == "prior"}
        for job in (JOB, slow, far)
    ]
    assert priors[0] == set()
    assert priors[1] == {"int8", "topk", "powersgd"}
    assert priors[2] == {"topk"}  # the only one of one round: on such a link messages cost, not bytes


def test_compressors_tried_first_reach_from_the_gentlest_to_the_strongest_that_pays() -> None:
    slow = JOB.replace(link=ss.Link(bandwidth="10 Mbit/s", latency="1 us"))
    found = [dict(seed.params) for seed in seeds(slow, default_space(slow)) if seed.origin == "prior"]
    alone = [params for params in found if params["optimizer"] != "lamb"]
    assert [params["compression"] for params in alone] == ["int8", "powersgd", "topk"]
    assert (
        alone[-1]["compression[topk].ratio"] == 0.003
    )  # the low end of its range: the fewest bytes there are
    assert [params["optimizer"] for params in alone] == ["nesterov", JOB.optimizer.name, "nesterov"]
    assert found[: len(alone)] == alone
    on_the_line = [params["compression"] for params in found if params["optimizer"] == "lamb"]
    assert on_the_line == ["int4", "int4", "none"]


def test_where_bytes_are_minimised_compressors_pay_without_a_slow_link_too() -> None:
    space = default_space(JOB)
    assert JOB.link is None
    for objectives, any_pays in (((), False), (("loss", "seconds"), False), (("loss", "bytes"), True)):
        found = seeds(JOB, space, objectives)
        assert any(seed.params.get("compression") != "none" for seed in found) == any_pays


_LIGHT = """
import sys
import shardscope as ss
from shardscope.tuning.apply import predicted_peak
from shardscope.tuning.session import StudySession
job = ss.Job.from_json(sys.argv[1])
limited = {"trials": 1, "objectives": ["loss"], "name": "light", "memory_limit": 1e12}
StudySession.open(job, {"optimizer.lr": (1e-3, 1e-1, "log")}, **limited).run()
print(predicted_peak(job), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_driver_that_limits_memory_needs_no_torch() -> None:
    job = JOB.replace(steps=2)
    done = subprocess.run(
        [sys.executable, "-c", _LIGHT, job.to_json()],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.split() == [str(predicted_peak(job)), "False"], done.stderr


@pytest.mark.slow
def test_a_trace_that_fails_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(DataError, match="^data='/nowhere.npz' does not exist; give the path"):
        traced(ss.Job(model="mlp", data="/nowhere.npz"))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(
        StudyError,
        match="the process that traces a step of model='mlp' failed: status 1; run shardscope doctor",
    ):
        traced(ss.Job(model="mlp", data="/nowhere.npz"))


@pytest.mark.slow
def test_jobs_traced_together_share_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("shardscope.prediction.traced._KNOWN", {})
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path))
    started, start = list[subprocess.Popen[str]](), subprocess.Popen

    def recorded(*args: Any, **settings: Any) -> subprocess.Popen[str]:
        started.append(start(*args, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    jobs = [ss.Job(model="mlp", data="digits", recompute=kind) for kind in ("none", "full")]
    with tracing_together():
        assert len({traced(job).table.flops for job in jobs}) == 1
        with pytest.raises(DataError, match="does not exist"):
            traced(ss.Job(model="mlp", data="/nowhere.npz"))
        assert [each.poll() for each in started] == [1]
    assert len(started) == 1


def test_memory_that_will_not_fit_costs_no_run() -> None:
    peak = predicted_peak(JOB)
    assert peak is not None
    assert MemoryLimit(peak).fault(JOB) is None
    assert "a rank would need" in str(MemoryLimit(peak - 1).fault(JOB))
    assert predicted_peak(JOB.replace(batch=128)) > peak
    assert predicted_peak(JOB.replace(precision="bf16-mixed")) is not None
    ss.tune(JOB, {"batch": [64, 1024]}, trials=1, name="memory", memory_limit=peak, sampler="random", seed=1)
    records = StudySession.open(name="memory").records()
    for record in records:
        assert (record.state == "impossible") == (record.params["batch"] == 1024)


@pytest.mark.slow
def test_every_searched_optimizer_has_as_many_trials_as_any_other_beside_those_of_the_baselines() -> None:
    ss.tune(
        JOB.replace(steps=3),
        {"optimizer": ["lamb", "lars"], "optimizer.lr": (1e-3, 1e-1, "log")},
        trials=7,
        name="equal",
    )
    session = StudySession.open(name="equal", trials=7)
    rows = session.report().rows
    assert {row.name: row.trials for row in rows} == {"adamw": 2, "nesterov": 1, "lamb": 2, "lars": 2}
    assert "with 1 to 2 trials each" in session.report().verdict


def test_the_report_says_so_when_a_baseline_wins() -> None:
    definition = Definition(
        job=JOB, space=Space(parameters={"optimizer": ["adamw", "lamb"]}), objectives=("loss",)
    )
    records = [
        _record(0, "adamw", 0.1),
        _record(1, "lamb", 0.2),
        _record(2, "lamb", 0.3),
        _record(3, "adamw", 0.4),
    ]
    said = report_of("study", records, definition)
    assert (
        said.verdict
        == "The baseline adamw has the lowest loss, 0.1, with 2 trials each: lower than lamb (0.2)."
    )
    assert (
        "unequal budgets"
        in report_of(
            "study", [records[0], *records[1:3], *[_record(4 + k, "lamb", 1.0) for k in range(3)]], definition
        ).verdict
    )


def _record(number: int, optimizer: str, loss: float) -> TrialRecord:
    return TrialRecord(
        number=number, state="complete", params={"optimizer": optimizer}, values={"loss": loss}, reason=None,
        origin="drawn", run=None, host=None, measured=None, retry_of=None, counted=True, pinned=False,
    )  # fmt: skip
