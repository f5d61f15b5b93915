"""Baselines of a study: they run, they are marked, and the sampler draws only the optimizers that were asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest

import shardscope as ss
from conformance.studies import instant
from shardscope import cli
from shardscope.errors import StudyError
from shardscope.spec.space import Space
from shardscope.tuning.priors import default_space
from shardscope.tuning.progress import trial_line
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6, eval_every=6)
LAMB: dict[str, Any] = {"optimizer": ["lamb"], "optimizer[lamb].lr": (1e-3, 1e-1, "log")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others are copies of."""
    return ss.launch(JOB, root=tmp_path_factory.mktemp("recorded")).wait(100).path


@pytest.fixture(autouse=True)
def runs_end_at_once(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardscope.tuning.driver.launch", instant(recorded))


def optimizers(name: str, *, origin: str | None = None) -> Counter[object]:
    """How many trials each optimizer has, baselines or all others if asked."""
    records = [r for r in StudySession.open(name=name).records() if r.counted and r.state == "complete"]
    kept = [r for r in records if origin is None or (r.origin == "baseline") == (origin == "baseline")]
    return Counter(record.params["optimizer"] for record in kept)


SPACES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "one": (LAMB, {"lamb"}),
    "two": ({"optimizer": ["lamb", "lars"], "optimizer.lr": (1e-3, 1e-1, "log")}, {"lamb", "lars"}),
    "one of the baselines": ({"optimizer": ["nesterov", "lamb"], "optimizer.lr": (1e-3, 1e-1, "log")},
                             {"nesterov", "lamb"}),
    "with compressors, which baselines are not for": (
        {**LAMB, "compression": ["none", "int4", "topk"], "compression[topk].ratio": (0.01, 0.1, "log")}, {"lamb"}),
    "with batches": ({**LAMB, "batch": ss.PowersOfTwo(32, 128)}, {"lamb"}),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("space", "ticked"), SPACES.values(), ids=SPACES)
def test_the_sampler_draws_only_the_optimizers_of_the_space(space: dict[str, Any], ticked: set[str]) -> None:
    ss.tune(
        JOB, space, trials=12, name="ticked", sampler="random", objectives=["loss", "bytes"], pruner="none"
    )
    assert set(optimizers("ticked", origin="others")) == ticked
    baselines = optimizers("ticked", origin="baseline")
    assert set(baselines) == {"adamw", "nesterov"}
    assert max(baselines.values()) <= 2  # the job as it is, and the baseline


@pytest.mark.sampled
@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "qmc", "nsga", "cma-es", "random", "own"])
def test_no_sampler_draws_another_one(sampler: str) -> None:
    given: Any = optuna.samplers.TPESampler(multivariate=True, seed=3) if sampler == "own" else sampler
    objectives = ["loss"] if sampler == "cma-es" else ["loss", "bytes"]
    ss.tune(JOB, LAMB, trials=9, name=sampler, sampler=given, objectives=objectives, pruner="none")
    assert optimizers(sampler) == {"lamb": 6, "adamw": 2, "nesterov": 1}  # the job as it is, too


def test_without_baselines_there_is_no_trial_of_any_other_optimizer() -> None:
    ss.tune(JOB, LAMB, trials=5, name="alone", baselines=False, sampler="random")
    assert optimizers("alone") == {"lamb": 5}


@pytest.mark.slow
def test_a_job_whose_own_optimizer_is_not_searched_is_not_drawn_with_it() -> None:
    ss.tune(JOB.replace(optimizer="sgd"), LAMB, trials=8, name="own", sampler="random", pruner="none")
    assert optimizers("own") == {"lamb": 6, "adamw": 1, "nesterov": 1}


@pytest.mark.slow
def test_each_optimizer_of_the_space_gets_as_many_trials() -> None:
    space = {"optimizer": ["lamb", "lars"], "optimizer.lr": (1e-3, 1e-1, "log")}
    ss.tune(JOB, space, trials=10, name="equal", sampler="random", pruner="none")
    assert optimizers("equal") == {"lamb": 4, "lars": 3, "adamw": 2, "nesterov": 1}


def test_a_resumed_study_draws_what_it_drew() -> None:
    ss.tune(JOB, LAMB, trials=3, name="resumed", sampler="random", pruner="none")
    for again, trials in (({}, 5), ({"job": JOB, "space": LAMB}, 7)):
        ss.tune(trials=trials, name="resumed", sampler="random", pruner="none", **again)  # type: ignore[arg-type]
    assert optimizers("resumed") == {"lamb": 4, "adamw": 2, "nesterov": 1}
    definition = StudySession.open(name="resumed").definition
    assert set(definition.searched.parameters) == set(LAMB)
    assert definition.searched.parameters["optimizer"] == Space(LAMB).parameters["optimizer"]
    whole = {**definition.space.parameters}
    with pytest.raises(StudyError, match="the space has changed in optimizer"):
        ss.tune(JOB, whole, trials=8, name="resumed")


@pytest.mark.slow
def test_a_driver_that_joins_while_another_one_has_fixed_the_optimizer_draws_no_other() -> None:
    given: dict[str, Any] = {"name": "joined", "sampler": "random", "pruner": "none"}
    one = StudySession.open(JOB, LAMB, trials=12, **given)
    other = StudySession.open(trials=12, seed=1, **given)
    drivers = [one.driver, other.driver]
    fix = [driver.choose.before_asking for driver in drivers if driver.choose is not None]

    class Races:
        """Looks at the study, then lets the other driver take what is queued."""

        def before_asking(self, study: Any, trials: Any) -> None:
            fix[0](study, trials)
            other.driver._start()

    one.driver.choose = Races()  # type: ignore[assignment]
    while drivers[0].tick() | drivers[1].tick():
        pass
    assert set(optimizers("joined", origin="others")) == {"lamb"}


@pytest.mark.slow
def test_all_optimizers_of_the_default_space_are_drawn() -> None:
    definition = StudySession.open(JOB, name="usual", batch_range="job").definition
    assert definition.searched == definition.space == default_space(JOB)


def test_a_baseline_is_marked_in_its_line() -> None:
    ss.tune(JOB, LAMB, trials=4, name="lines", sampler="random", pruner="none")
    lines = [trial_line(record) for record in StudySession.open(name="lines").records()]
    marked = {line.split("optimizer=")[1].split()[0] for line in lines if "  baseline  " in line}
    assert marked == {"adamw", "nesterov"}


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "others"), [([], {"adamw", "nesterov"}), (["--no-baselines"], set())])
def test_the_command_runs_baselines_unless_told_not_to(
    options: list[str], others: set[str], runs_root: Path
) -> None:
    command = "tune --model mlp --ranks 2 --steps 6 --eval-every 6 --trials 8 --name shell --sampler random"
    space = ["--space", "optimizer=lamb,lars", "--space", "optimizer.lr=1e-3:1e-1:log"]
    assert cli.main([*command.split(), *space, *options]) == 0
    assert set(optimizers("shell")) - {"lamb", "lars"} == others
