"""The entry point `shardscope.goodput`: the cost of failures for a job, predicted from costs measured in one of its
runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from shardscope._experimental import experimental
from shardscope.analytic.failing_runs import (
    FailingRun,
    duration_s,
    duration_with_progress_s,
    simulated_s,
)
from shardscope.analytic.reliability import Floats, Reliability, expected
from shardscope.calibration.calibration import Interval
from shardscope.errors import RunUnreadable, SpecError
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.restarts import Restart
from shardscope.runlog.schema import Event
from shardscope.runlog.steps import WARM_UP_STEPS, Steps
from shardscope.runtime import Run
from shardscope.spec.fault_kinds import Kill
from shardscope.spec.faults import Faults
from shardscope.spec.units import duration_text, quantity

_SIMULATED = 10_000


@dataclass(frozen=True)
class RunCosts:
    """Measured costs of a run that saves checkpoints and restarts, as means in seconds.

    Steps in which a `slow` fault slowed a rank down are left out.

    Attributes:
        step_s: Time of a step that counts (`RunLog.useful_s`).
        between_s: Time between two consecutive steps without a save in between.
        every: Number of steps between two checkpoints, or copies in memory.
        save_s: Additional time between two consecutive steps if a checkpoint is saved in between.
        write_s: Additional time until a checkpoint that is written in the background is complete.
        restart_s: Time from a failure to the first step after it, plus the extra time of the slower first steps.
        setup_s: Time from the start of the first rank to the first step, plus the extra time of the slower first steps.
        ending_s: Time from the last step to the end of the run, as for the last evaluation.
        num_saves: Number of saves that were measured.
        num_restarts: Number of restarts that were measured.
    """

    step_s: float
    between_s: float
    every: int
    save_s: float
    write_s: float
    restart_s: float
    setup_s: float
    ending_s: float
    num_saves: int
    num_restarts: int

    def failing(self, steps: int, every: int | None = None) -> FailingRun:
        """Return the duration parameters of a run of `steps` steps with a checkpoint every `every` steps."""
        each = self.step_s + self.between_s
        return FailingRun(
            work_s=steps * each, interval_s=(every or self.every) * each, save_s=self.save_s,
            restart_s=self.restart_s, write_s=self.write_s,
        )  # fmt: skip


@dataclass(frozen=True)
class ExpectedGoodput:
    """Expected goodput of a run: the fraction of its time spent in steps that count, as `Summary.goodput` measures it.

    Attributes:
        costs: Measured costs on which the prediction is based.
        steps: Number of steps of the run.
        every: Number of steps between two checkpoints.
        mtbf_s: Mean time between failures of the whole job, in seconds; None for a plan of faults.
        durations_s: Time of the whole run, in seconds, in each simulated run; a single value for a plan of faults.
    """

    costs: RunCosts
    steps: int
    every: int
    mtbf_s: float | None
    durations_s: Floats

    @property
    def goodputs(self) -> Floats:
        """Goodput of each simulated run."""
        return np.asarray(self.steps * self.costs.step_s / self.durations_s)

    @property
    def mean(self) -> float:
        """Mean goodput of the simulated runs."""
        return float(self.goodputs.mean())

    @property
    def total(self) -> float:
        """Goodput of all simulated runs together: the time of all steps that count, divided by the time of all runs."""
        return float(self.steps * self.costs.step_s / self.durations_s.mean())

    @property
    def interval(self) -> Interval:
        """90 % prediction interval of the goodput of a run, due to the randomness of failures.

        It does not include the uncertainty of the measured costs, which may come from a single save or restart.
        """
        return Interval(*map(float, np.quantile(self.goodputs, (0.05, 0.95))))

    @property
    def endless(self) -> Reliability | None:
        """Closed-form goodput of an endless run; None for a plan of faults."""
        run = self.costs.failing(self.steps, self.every)
        if self.mtbf_s is None:
            return None
        return expected(
            mtbf_s=self.mtbf_s, save_s=run.save_s, restart_s=run.restart_s, interval_s=run.interval_s,
            write_s=run.write_s,
        )  # fmt: skip

    def __repr__(self) -> str:
        costs = self.costs
        saves = f"checkpoints of {duration_text(costs.save_s)} every {_times(self.every, 'step')}"
        source = f"costs from {_times(costs.num_saves, 'save')} and {_times(costs.num_restarts, 'restart')}"
        told = (
            f"{_times(self.steps, 'step')} of {duration_text(costs.step_s)}, {saves}, restarts of "
            f"{duration_text(costs.restart_s)}; {source}"
        )
        if self.mtbf_s is None:
            return f"goodput {self.mean:.1%} with these faults: {told}"
        low, high = self.interval
        failing = f"a failure every {duration_text(self.mtbf_s)}"
        return f"goodput {self.mean:.1%} ({low:.1%} to {high:.1%} in 90 % of runs) with {failing}: {told}"


@experimental
def goodput(
    run: Run | str | Path,
    *,
    mtbf_s: str | float | None = None,
    faults: Faults | str | None = None,
    steps: int | None = None,
    every: int | None = None,
    seed: int = 0,
    root: str | Path | None = None,
) -> ExpectedGoodput:
    """Predict the goodput of a job that fails, from the step, checkpoint and restart times measured in one of its runs.

    The goodput is defined as in `Summary.goodput`: the time of the steps that count, divided by the time of
    the whole run, with setup and the last evaluation. Its distribution comes from simulated runs of this
    length; `endless` is the mean of an endless run. The uncertainty of the measured costs is not included.
    Steps that a fault slowed down are left out.

    Args:
        run: A run of the job with at least one restart, one step after which it saved, and one after which it did not;
            or its name or path.
        mtbf_s: Mean time between random failures of the whole job, in seconds or with a unit.
        faults: Instead of `mtbf_s`: a plan of faults, whose kills are either all at steps or all at times.
        steps: Number of steps; None to use the number of the run's job.
        every: Number of steps between two checkpoints; None to use the number of the run.
        seed: Seed of the simulated failures.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Example:
        >>> job = ss.Job(model="mlp", data="digits", world_size=2, checkpoint=10, recovery=1)  # doctest: +SKIP
        >>> run = ss.launch(job, faults=ss.Faults().kill(1, step=25)).wait()  # doctest: +SKIP
        >>> ss.goodput(run, mtbf_s="20 s", steps=1000)  # doctest: +SKIP

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run has no checkpoint or no restart, or saves after every step, or all steps are slowed.
        SpecError: Neither `mtbf_s` nor `faults` is given, or both are, or a value is not valid, or a fault cannot
            occur in the job.
    """
    run = Run.attach(run, root)
    if (mtbf_s is None) == (faults is None):
        raise SpecError(
            "goodput needs either mtbf_s, such as mtbf_s='6 h', or faults=ss.Faults()...; give one of them"
        )
    for name, count in (("steps", steps), ("every", every)):
        if count is not None and (type(count) is not int or count < 1):
            raise SpecError(f"{name}={count!r} is not valid; give a whole number of at least 1")
    costs = costs_of(run)
    num_steps, apart = steps or run.job.last_step, every or costs.every
    failing = costs.failing(num_steps, apart)
    if mtbf_s is not None:
        mean = quantity(mtbf_s, "s", field="mtbf_s")
        trained = simulated_s(failing, mtbf_s=mean, runs=_SIMULATED, seed=seed)
    else:
        plan = Faults.of(faults)
        plan.check(run.job if steps is None else run.job.replace(steps=steps, until=None), run.cluster)
        mean, trained = None, np.array([_with_plan(plan, failing, costs)])
    return ExpectedGoodput(costs, num_steps, apart, mean, costs.setup_s + trained + costs.ending_s)


def costs_of(run: Run) -> RunCosts:
    """Return the measured costs of a run with checkpoints and restarts.

    Raises:
        RunUnreadable: The run has no checkpoint or no restart, or saves after every step.
    """
    whole, events, faults = run.reduced(), run.events(), run.faults
    log = _without_slowed(whole, faults)
    if whole.steps and not log.steps:
        raise RunUnreadable(
            f"faults='{faults}' slow every step of run {run.id}, so the usual step time is unknown; give a run with "
            "other steps"
        )
    saves = [event for event in events if event["event"] in ("checkpoint", "replica") and event["rank"] == 0]
    usual_s = log.step_time_s or 0.0
    restarts_s = [
        each.recovered_t
        - each.first_steps_s[0]
        - failed_t
        + _additional_s(_first_steps_s(each, faults), usual_s)
        for each, failed_t in zip(log.restarts, _failed_at(log), strict=True)
        if each.recovered_t is not None
    ]
    saved = {event["step"] for event in saves}
    gaps = {step: gap for step, gap in _gaps(log).items() if step > WARM_UP_STEPS}
    after_saves = [gap for step, gap in gaps.items() if step in saved]
    others = [gap for step, gap in gaps.items() if step not in saved]
    if not (after_saves and restarts_s):
        raise RunUnreadable(
            f"run {run.id} has {_times(len(after_saves), 'checkpoint')} between steps and "
            f"{_times(len(restarts_s), 'restart')}; give a run with at least one of each, such as one with "
            "checkpoint=10, recovery=1 and faults='kill rank=0 step=15'"
        )
    if not others:
        raise RunUnreadable(
            f"run {run.id} saves a checkpoint or a copy in memory after every step, so the time of a save is unknown; "
            "give a run that saves less often, such as one with checkpoint=10 or replica_every=10"
        )
    apart = Counter(after - before for before, after in pairwise(sorted(saved)))
    between_s, last = fmean(others), whole.steps[-1]
    at_start = [seconds for step, seconds in log.warm_up.items() if step <= WARM_UP_STEPS]
    save_s = max(0.0, fmean(after_saves) - between_s)
    return RunCosts(
        step_s=log.useful_s / len(log.steps),
        between_s=between_s,
        every=apart.most_common(1)[0][0] if apart else min(saved),
        save_s=save_s,
        write_s=fmean(event["seconds"] - event.get("blocked_s", event["seconds"]) for event in saves),
        restart_s=fmean(restarts_s),
        setup_s=_begun(events) - log.first_t + _additional_s(at_start, usual_s),
        ending_s=max(0.0, log.last_t - last.t - save_s * (last.number in saved)),
        num_saves=len(after_saves),
        num_restarts=len(restarts_s),
    )


def _without_slowed(log: RunLog, faults: Faults) -> RunLog:
    """Return the log without the steps in which a fault slowed a rank down."""
    return replace(
        log,
        steps=Steps(step for step in log.steps if not faults.slows(step.number)),
        warm_up={step: seconds for step, seconds in log.warm_up.items() if not faults.slows(step)},
    )


def _first_steps_s(restart: Restart, faults: Faults) -> list[float]:
    """Return the durations of the first steps after a restart, in seconds, without steps that a fault slowed down."""
    numbered = enumerate(restart.first_steps_s, restart.step + 1)
    return [seconds for step, seconds in numbered if not faults.slows(step)]


def _gaps(log: RunLog) -> dict[int, float]:
    """Return the time after each step until the next step begins, in seconds; without gaps for restarts and resizes."""
    found = {}
    for before, after in pairwise(log.steps):
        is_next = (after.number, after.world_size) == (before.number + 1, before.world_size)
        if is_next and not any(before.t < each.t < after.t for each in log.restarts):
            found[before.number] = max(0.0, after.t - after.step_time_s - before.t)
    return found


def _failed_at(log: RunLog) -> list[float]:
    """Return the time of each failure: when its fault was injected, or else when the agent noticed the failure."""
    since, found = 0.0, []
    for each in log.restarts:
        kills = [
            event["t"]
            for event in log.faults
            if event["kind"] == "kill" and since < event["t"] <= each.failed_t
        ]
        found.append(min(kills, default=each.failed_t))
        since = each.t
    return found


def _additional_s(first_steps_s: Iterable[float], usual_s: float) -> float:
    """Return how much longer the first steps after a start took than usual steps, in seconds."""
    return sum(max(0.0, each - usual_s) for each in first_steps_s)


def _begun(events: Iterable[Event]) -> float:
    """Return when all ranks of the run's first step had begun it, in Unix seconds; more ranks may have joined later."""
    steps = [event for event in events if event["event"] == "step"]
    number, first = min(event["step"] for event in steps), dict[int, float]()
    for event in steps:
        if event["step"] == number:
            first.setdefault(event["rank"], event["t"] - event["step_time_s"])
    return max(first.values())


def _with_plan(plan: Faults, run: FailingRun, costs: RunCosts) -> float:
    """Return the duration of a run with the kills of a plan.

    Raises:
        SpecError: Some kills are at steps and others at times, or there are other faults.
    """
    kills = [fault for fault in plan if isinstance(fault, Kill) and fault.during == "step"]
    if len(kills) != len(plan):
        raise SpecError(
            f"goodput can only predict kills (kill(step=...) or kill(at=...)), but faults='{plan}' has "
            "other faults; leave them out"
        )
    times = [kill.at_s for kill in kills if kill.at_s is not None]
    if not times:
        each = costs.step_s + costs.between_s
        return duration_with_progress_s([(step - 1) * each for step in _steps_of(kills)], run)
    if len(times) < len(kills):
        raise SpecError(f"faults='{plan}' has kills at steps and kills at times; give one kind")
    return duration_s(times, run)


def _steps_of(kills: Iterable[Kill]) -> list[int]:
    """Return the steps of failures: ranks that are killed before the same step fail together."""
    counts: dict[int, Counter[int | None]] = {}
    for kill in kills:
        assert kill.step is not None
        counts.setdefault(kill.step, Counter())[kill.rank if kill.node is None else -1 - kill.node] += 1
    return [step for step, ranks in counts.items() for _ in range(max(ranks.values()))]


def _times(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'s' * (count != 1)}"
