"""The driver of a study: asks for settings, starts a real run for each, watches them, tells what came of them.

    driver = Driver(study, ledger, definition, trials=40)
    while driver.tick():        never waits for a run to train; its docstring says what it may wait for
        time.sleep(0.05)

All state is in the study's storage and in run directories. A driver that is killed leaves nothing that another, or the
next, cannot take up (see `recovery`); any number of drivers may work on one study.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import LaunchError, RunNotFound, ShardscopeError, SpecError, StudyError
from shardscope.runtime import launch
from shardscope.runtime.run import Run
from shardscope.runtime.rundir import RunDir
from shardscope.runtime.schema import Cause
from shardscope.spec import Job
from shardscope.spec.space import Value
from shardscope.tuning import recovery
from shardscope.tuning.apply import apply
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import Measured, Meter, Objective, evaluated, values_of
from shardscope.tuning.records import (
    DRIVER,
    IMPOSSIBLE,
    MEASURED,
    NOT_COUNTED,
    REASON,
    RUN,
    Ledger,
    measured_to,
)
from shardscope.tuning.samplers import constrain, suggest
from shardscope.tuning.storage import Patience, within

_RECOVER_EVERY_S = 5.0
_GRACE_S = 1.0
_LOOK_EVERY_S = 0.5
"""How often a driver with nothing to start asks the storage whether that has changed."""
_GIVING_WAY_S = 1.0
TOLD_WITHIN_S = 5.0
"""How long a stop waits for the storage to take down what was stopped."""
MOST_ATTEMPTS = 3
"""How often a trial is begun whose run something outside keeps killing; memory that runs out looks like that too."""
_MOST_IMPOSSIBLE = 20
"""Impossible trials in a row after which the space itself is at fault."""


class Pruner(Protocol):
    """Decides whether a running trial is worth its remaining steps."""

    def reason(self, live: Live, trials: list[FrozenTrial], /) -> str | None:
        """Why to stop it, as a sentence; None to let it go on. Called whenever it was evaluated once more.

        The trial waits for the answer, but no longer than one of its steps takes.
        """
        ...


@runtime_checkable
class Reporting(Protocol):
    """A pruner that writes into the study how a trial goes."""

    def report(self, live: Live, /) -> None:
        """Write what is new of its curve. Called before a trial is told, too: it may have ended between two looks."""
        ...


class Feasibility(Protocol):
    """Decides before anything runs whether a job can be run here."""

    def fault(self, job: Job) -> str | None:
        """Why not, as a sentence; None where it can."""
        ...


class Choose(Protocol):
    """May fix some settings of the next trial before it is drawn."""

    def before_asking(self, study: optuna.Study, trials: list[FrozenTrial]) -> None:
        """Add a trial to the study's queue, or do nothing."""
        ...


@dataclass
class Live:
    """A trial that this driver runs."""

    trial: optuna.Trial
    params: Mapping[str, Value]
    job: Job
    run: Run
    meter: Meter
    stop_because: str | None = None
    judged_at: int = 0
    beat: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """Of the trial in its study."""
        return self.trial.number

    @property
    def measured(self) -> Measured:
        """The figures of what has been read of its run; computed when they are asked for."""
        return self.meter.measured()


@dataclass
class Driver:
    """Runs trials until the study has as many as asked for.

    Args:
        study: Where trials are asked for.
        ledger: Where they are told.
        definition: What it is about.
        trials: That the study is to have in all, by whichever driver; what was impossible or run again is not counted.
        folder: For the run directories of its trials.
        own: The user's own objectives, by name.
        parallel: Trials at once.
        seed: Called before anything is run; queues what is to be run first.
        patience: With a storage that is away.
    """

    study: optuna.Study
    ledger: Ledger
    definition: Definition
    trials: int
    folder: Path
    own: Mapping[str, Objective] = field(default_factory=dict)
    parallel: int = 1
    pruner: Pruner | None = None
    feasibility: Feasibility | None = None
    choose: Choose | None = None
    seed: Callable[[], None] | None = None
    patience: Patience = field(default_factory=Patience)
    live: dict[int, Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._me = recovery.enrol(self)
        self._watch = recovery.Watch()
        self._recovered_at = self._looked_at = -math.inf
        self._begun: int | None = None  # asked for, and without a run yet
        self._unsettled: tuple[optuna.Trial, float] | None = None
        self._is_over = False
        self._impossible = 0
        self._stopping = False

    # The loop.

    def tick(self) -> bool:
        """Do what there is to do now; returns whether there will be more.

        There is as long as the study has not all its trials, also while the last of them run elsewhere.

        It may wait for two things, so interfaces call it on a thread of its own: for a storage that is unreachable, up
        to `patience.seconds` (ten minutes unless set) at each call of the storage or until `patience.given_up` is set;
        and for a run that is pruned to stop, which takes a step or a second, ten seconds more if its agent is stuck.

        Raises:
            StudyError: The storage does not answer, or hardly anything in the space can be run.
        """
        if self.seed is not None:
            self.patience(self.seed)
            self.seed = None
        for live in list(self.live.values()):
            self._follow(live)
        if time.monotonic() - self._recovered_at > min(_RECOVER_EVERY_S, recovery.beat_s()):
            self.patience(self._recover)
            self._recovered_at = time.monotonic()
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            while not self._stopping and len(self.live) < self.parallel:
                if not self._start():
                    self._looked_at = time.monotonic()
                    break
        return bool(self.live) or self._unsettled is not None or not (self._stopping or self._is_over)

    def stop(self) -> None:
        """Stop the runs; their trials are run again, first, when the study goes on.

        Answers also while the storage does not: whoever goes on finds out by itself what was left.
        """
        self._stopping = True
        self.patience.given_up.set()
        for live in self.live.values():
            RunDir(live.run.path).request_stop(_GRACE_S)
        for live in self.live.values():
            live.run.stop(_GRACE_S)
        left = [*self.live, *([] if self._begun is None else [self._begun])]
        self.live.clear()
        self._begun = self._unsettled = None
        if left:
            within(TOLD_WITHIN_S, self.patience, self._leave, left)
        recovery.resign(self._me)

    def _leave(self, numbers: list[int]) -> None:
        for number in numbers:
            self._set_aside(number, "the study was stopped")

    def can_prune(self, number: int) -> bool:
        """Whether a trial is this driver's to stop."""
        return number in self.live

    def prune(self, number: int, reason: str = "pruned by hand") -> None:
        """Stop a trial that runs here and count it as pruned.

        Raises:
            StudyError: It does not run here.
        """
        if number not in self.live:
            raise StudyError(f"trial {number} does not run here; running are {sorted(self.live) or 'none'}")
        self._cut(self.live[number], reason)

    # Starting.

    def _start(self) -> bool:
        """Begin a trial, or go on with one that has been begun; False if there is nothing to do for it now."""
        trials = self.patience(self._looked)
        self._is_over = recovery.ended(trials) >= self.trials
        try:
            if self._unsettled is None:
                if recovery.begun(trials) >= self.trials or (trial := self._next(trials)) is None:
                    return False
                self._begun = trial.number
                self.patience(trial.set_user_attr, DRIVER, self._me)
                self._unsettled = trial, time.monotonic() + _GIVING_WAY_S
            if not self._settle(*self._unsettled):
                return False
        except UpdateFinishedTrialError:
            self._unsettled = None  # given up for lost while the storage was away, and taken by somebody
        self._begun = None
        return True

    def _looked(self) -> list[FrozenTrial]:
        trials = self.study.get_trials(deepcopy=False)
        if recovery.replace_lost(self.study, trials):
            trials = self.study.get_trials(deepcopy=False)
        return trials

    def _next(self, trials: list[FrozenTrial]) -> optuna.Trial | None:
        """A trial to be run again, else one asked for by hand, else a new one; None where all places are taken."""
        is_full = len(recovery.places(trials)) >= self.trials
        for number in [*recovery.retries(trials), *([] if is_full else recovery.asked_again(trials))]:
            held = self.patience(self.ledger.take, number)
            if held is not None:
                return self.patience(optuna.Trial, self.study, held)
        if is_full:
            return None
        if self.choose is not None:
            self.patience(self.choose.before_asking, self.study, trials)
        return self.patience(self.study.ask)

    def _settle(self, trial: optuna.Trial, deadline: float) -> bool:
        """Run a trial, or give it up if others began theirs at the same moment; False if that is not sure yet.

        The later of two gives way. Until the deadline a later tick looks again.
        """
        trials = self.patience(self.study.get_trials, deepcopy=False)
        reason, is_sure = recovery.surplus(trial.number, trials, self.trials)
        if not is_sure and time.monotonic() <= deadline:
            return False
        self._unsettled = None
        if reason is None:
            self._begin(trial)
        else:
            self._tell(trial, None, TrialState.FAIL, {REASON: reason, NOT_COUNTED: recovery.SURPLUS})
        return True

    def _begin(self, trial: optuna.Trial) -> None:
        """Draw the settings of a trial and start its run."""
        try:
            params = self._draw(trial)
            job = self._job(trial, params)
        except SpecError as error:
            self._tell_impossible(trial, str(error))
            return
        self._impossible = 0
        self._launch(trial, params, job)

    def _draw(self, trial: optuna.Trial) -> dict[str, Value]:
        """The settings of a trial, as the storage has them.

        Raises:
            SpecError: Somebody has queued it with a value that is not in the space.
        """
        asked = [trial]

        def draw() -> dict[str, Value]:
            if not asked:  # the storage was away, and may hold an answer that never arrived
                asked.append(optuna.Trial(self.study, self.ledger.id_of(trial.number)))
            return suggest(asked.pop(), self.definition)

        return self.patience(draw)

    def _job(self, trial: optuna.Trial, params: Mapping[str, Value]) -> Job:
        """The job of a trial.

        Raises:
            SpecError: It cannot exist, or not here.
        """
        name = f"trial-{trial.number:04d}"
        job = evaluated(apply(self.definition.job, params, equal=self.definition.equal)).replace(name=name)
        fault = self.feasibility.fault(job) if self.feasibility is not None else None
        if fault is not None:
            raise SpecError(fault)
        return job

    def _tell_impossible(self, trial: optuna.Trial, reason: str) -> None:
        self.patience(constrain, trial, 1.0)
        self._tell(trial, None, TrialState.PRUNED, {REASON: reason, NOT_COUNTED: IMPOSSIBLE})
        self._impossible += 1
        if self._impossible >= _MOST_IMPOSSIBLE:
            raise StudyError(
                f"{_MOST_IMPOSSIBLE} trials in a row could not be run, the last because {reason}; narrow the space"
            )

    def _launch(self, trial: optuna.Trial, params: Mapping[str, Value], job: Job) -> None:
        self.patience(constrain, trial, 0.0)
        try:
            run = launch(job, root=self.folder, judged=self.pruner is not None, preflight=False)
        except BrokenPipeError:  # its launch server was killed this moment; the next launch starts another
            if not self._may_retry(trial.number):
                raise
            self.patience(self._set_aside, trial.number, "its launch server was killed", was_killed=True)
            return
        except LaunchError as error:
            raise not_launched(trial.number, error) from error
        self.live[trial.number] = Live(trial, params, job, run, Meter(run))
        self._write(self.live[trial.number], RUN, str(run.path))

    # Watching.

    def _follow(self, live: Live) -> None:
        alive = live.run.is_alive  # before reading: what it wrote last is then there
        live.meter.read()
        if not alive:
            self._finish(live)
            return
        if time.monotonic() - live.beat > recovery.beat_s():
            live.beat = time.monotonic()
            self._write(live, recovery.HEARTBEAT, time.time())
        if (
            live.number in self.live
            and self.pruner is not None
            and live.meter.num_evaluations > live.judged_at
        ):
            live.judged_at = live.meter.num_evaluations
            trials = self.patience(self.study.get_trials, deepcopy=False)
            reason = self.patience(self.pruner.reason, live, trials)
            if reason is None:
                # It waits no longer than a step takes: on a full disk, or without its folder, that does.
                with suppress(OSError, SpecError):
                    live.run.go_on(live.measured.curve[-1][0])
            else:
                self._cut(live, reason)

    def _write(self, live: Live, name: str, value: Any) -> None:
        """Write into a running trial; stop its run where somebody has taken the trial over meanwhile."""
        try:
            self.patience(live.trial.set_user_attr, name, value)
        except UpdateFinishedTrialError:
            live.run.stop(_GRACE_S)
            self._drop(live)

    def _drop(self, live: Live) -> None:
        self.live.pop(live.number, None)
        self._looked_at = -math.inf

    def _cut(self, live: Live, reason: str) -> None:
        live.run.stop(_GRACE_S)
        live.meter.read()
        self._tell_measured(live, None, TrialState.PRUNED, reason)

    def _finish(self, live: Live) -> None:
        """Tell what came of a run that has ended."""
        state, error = live.run.state, live.run.error
        if state == "completed":
            self._complete(live)
        elif state == "stopped" and live.run.cause is Cause.REQUESTED:
            self._tell_measured(live, None, TrialState.PRUNED, "its run was stopped by hand")
        elif (state == "stopped" or was_killed(live.run)) and self._may_retry(live.number):
            self.patience(self._set_aside, live.number, _sentence(error), was_killed=True)
            self._drop(live)
        else:
            self._tell_measured(live, None, TrialState.FAIL, _sentence(error))

    def _complete(self, live: Live) -> None:
        values, fault = values_of(self.definition, live.run, live.measured, self.own)
        if fault is not None:
            self._tell_measured(live, None, TrialState.FAIL, fault)
        else:
            self._tell_measured(live, list(values.values()), TrialState.COMPLETE, None)

    # Telling.

    def _tell_measured(
        self, live: Live, values: list[float] | None, state: TrialState, reason: str | None
    ) -> None:
        self._report(live)
        attrs: dict[str, Any] = {MEASURED: measured_to(live.measured)}
        if reason is not None:
            attrs[REASON] = reason
        self._tell(live.trial, values, state, attrs)
        self._drop(live)

    def _report(self, live: Live) -> None:
        if isinstance(self.pruner, Reporting):
            with suppress(UpdateFinishedTrialError):  # somebody has taken it over, and nothing here counts
                self.patience(self.pruner.report, live)

    def _tell(
        self, trial: optuna.Trial, values: list[float] | None, state: TrialState, attrs: Mapping[str, Any]
    ) -> None:
        self.patience(self.ledger.end, trial.number, state, values, attrs)

    def _may_retry(self, number: int) -> bool:
        trials = self.patience(self.study.get_trials, deepcopy=False)
        return recovery.attempts(trials, number) < MOST_ATTEMPTS

    def _set_aside(self, number: int, reason: str, *, was_killed: bool = False) -> None:
        recovery.set_aside(self.ledger, number, reason, was_killed=was_killed)
        recovery.replace_lost(self.study, self.study.get_trials(deepcopy=False))

    def _recover(self) -> None:
        """Take up what drivers that are gone have left behind."""
        trials = self.study.get_trials(deepcopy=False)
        for trial in self._watch.gone([trial for trial in trials if trial.number not in self.live]):
            self._adopt(trial, trials)
        recovery.replace_lost(self.study, self.study.get_trials(deepcopy=False))

    def _adopt(self, trial: FrozenTrial, trials: list[FrozenTrial]) -> None:
        """Tell the figures of a run that ended after its driver, else set the trial aside."""
        run = self._run_of(trial)
        excess = None if trial.params else recovery.surplus(trial.number, trials, self.trials)[0]
        if excess is not None:  # its driver had not come to find out
            self.ledger.end(
                trial.number, TrialState.FAIL, None, {REASON: excess, NOT_COUNTED: recovery.SURPLUS}
            )
        elif run is not None and run.state == "completed":
            measured = self._measured_of(trial, run)
            values, fault = values_of(self.definition, run, measured, self.own)
            attrs = {MEASURED: measured_to(measured), **({REASON: fault} if fault else {})}
            state = TrialState.FAIL if fault else TrialState.COMPLETE
            self.ledger.end(trial.number, state, None if fault else list(values.values()), attrs)
        else:
            recovery.set_aside(self.ledger, trial.number, "its driver ended before the run did")
            if run is not None:
                RunDir(run.path).request_stop(
                    _GRACE_S
                )  # its driver may be gone, and the driver's process not

    def _measured_of(self, trial: FrozenTrial, run: Run) -> Measured:  # noqa: ARG002 - where trials have pieces
        return Meter(run).poll()

    def _run_of(self, trial: FrozenTrial) -> Run | None:
        path = trial.user_attrs.get(RUN)
        return None if path is None else self._attached(path)

    def _has(self, run: str) -> bool:
        return self._attached(run) is not None

    def _attached(self, run: str) -> Run | None:
        """A run that the storage names, if it is one of this driver's folder and can be read."""
        try:
            return Run.attach(run) if recovery.is_among(run, self.folder) else None
        except RunNotFound:
            return None


def not_launched(number: int, error: LaunchError) -> StudyError:
    """What ends a driver whose machine takes no more runs: a full disk, most often."""
    return StudyError(
        f"trial {number} could not be launched: {error}; it is the first to be run when the study goes on"
    )


def was_killed(run: Run) -> bool:
    """Whether something outside ended the run: a process of it was killed or never started, nothing in it failed."""
    return run.cause in (Cause.KILLED, Cause.NOT_STARTED)


def _sentence(error: ShardscopeError | None) -> str:
    return str(error).splitlines()[0] if error is not None else "its run was ended from outside"
