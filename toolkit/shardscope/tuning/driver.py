"""The driver of a study: it samples settings, launches a real run for each, watches the runs and records the results.

    driver = TrialDriver(study, writer, definition, trials=40)
    while driver.tick():        never blocks on training; its docstring lists what it may block on
        time.sleep(0.05)

All state is stored in the study's storage and in run directories. If a driver is killed, any other driver can take over
its trials (see `recovery`). Any number of drivers may work on one study.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import LaunchError, RunNotFound, ShardscopeError, SpecError, StudyError
from shardscope.runtime import launch
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job
from shardscope.spec.space import Value
from shardscope.tuning import recovery
from shardscope.tuning.apply import MemoryLimit, apply, checked_rows
from shardscope.tuning.definition import Definition
from shardscope.tuning.measured import Objective, TrialMetrics, TrialReader, evaluated, values_of
from shardscope.tuning.records import (
    DRAWN,
    DRIVER,
    IMPOSSIBLE,
    MEASURED,
    NOT_COUNTED,
    OVER_BUDGET,
    REASON,
    RUN,
    TrialWriter,
    measured_to,
)
from shardscope.tuning.runs import GRACE_S, RunDriver, Watched
from shardscope.tuning.samplers import constrain, suggest
from shardscope.tuning.storage import StorageRetry, within
from shardscope.tuning.untried import Settings, all_settings, settings_left, tried_before, used_up_text

if TYPE_CHECKING:
    from shardscope.tuning.priors import EqualBudgets

_RECOVER_EVERY_S = 5.0
_READ_EVERY_S = 0.5
"""Time between two reads of the storage by a driver that has nothing to start, in seconds."""
_SETTLE_S = 1.0
TOLD_WITHIN_S = 5.0
"""Time that `TrialDriver.stop` waits for the storage to record the stopped trials, in seconds."""
MOST_ATTEMPTS = 3
"""Maximum number of attempts at a trial whose runs are killed from outside, for example for lack of memory."""
_MOST_IMPOSSIBLE = 20
"""The driver raises an error about the space after this many consecutive impossible trials."""


class Pruner(Protocol):
    """Interface of pruners, which decide whether a running trial is worth its remaining steps."""

    def reason(self, live: Live, trials: list[FrozenTrial], /) -> str | None:
        """Return a sentence on why the trial must be stopped, or None to continue. Called after each evaluation.

        The trial waits for the decision, but no longer than one of its steps takes.
        """
        ...


@runtime_checkable
class Reporting(Protocol):
    """A pruner that reports intermediate values of a trial to the study."""

    def report(self, live: Live, /) -> None:
        """Report new evaluations of the trial to the study. Called after evaluations, and before the trial ends."""
        ...


@dataclass
class Live(Watched):
    """A trial whose run this driver is watching."""

    trial: optuna.Trial
    params: Mapping[str, Value]
    job: Job
    decided_at: int = 0
    beat: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """Number of the trial in its study."""
        return self.trial.number

    @property
    def measured(self) -> TrialMetrics:
        """Metrics from the events read so far from the run; computed on access."""
        return self.meter.measured()


@dataclass
class TrialDriver(RunDriver[Live]):
    """Driver that runs trials until the study has the requested number of them.

    Args:
        study: Optuna study that suggests the settings of trials.
        writer: Writer of the results of trials.
        definition: Definition of the study.
        trials: Total number of trials over all drivers; impossible and retried trials are not counted.
        folder: Folder for the run directories of the trials.
        own: User-defined objectives by name.
        parallel: Number of trials to run at the same time.
        pruner: Decides after each evaluation whether a trial is stopped early; None prunes nothing.
        feasibility: Decides before launch whether a trial can run on this machine; None launches every valid job.
        choose: Hook that may fix some settings of a new trial before the remaining ones are sampled.
        seed: Function, called before any trial runs, that queues the settings to run first.
        retry: Retry policy for an unreachable storage.
    """

    study: optuna.Study
    writer: TrialWriter
    definition: Definition
    trials: int
    folder: Path
    own: Mapping[str, Objective] = field(default_factory=dict)
    parallel: int = 1
    pruner: Pruner | None = None
    feasibility: MemoryLimit | None = None
    choose: EqualBudgets | None = None
    seed: Callable[[], None] | None = None
    retry: StorageRetry = field(default_factory=StorageRetry)
    live: dict[int, Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._identity = recovery.enrol(self)
        self._heartbeats = recovery.Watch()
        self._recovered_at = self._read_at = -math.inf
        self._begun: int | None = None  # number of a trial that exists in the study and has no run yet
        self._unsettled: tuple[optuna.Trial, float] | None = None
        self._is_over = False
        self._impossible = 0
        self._stopping = False
        self._settings = all_settings(self.definition)  # of the space; None if it is endless
        self._repeats = 0  # consecutive choices of the sampler that had been tried
        self.used_up = ""  # a sentence, once the study has ended early because nothing new is left to try

    # The loop.

    def tick(self) -> bool:
        """Follow the running trials and start new ones; return whether more ticks are needed.

        More ticks are needed until the study has all its trials, even if other drivers are running the last of them.

        A tick may block, so user interfaces call it on a separate thread. If the storage is unreachable, each storage
        call waits up to `retry.seconds` (ten minutes by default), or until `retry.given_up` is set. Pruning a run
        blocks until the run has stopped: for one step or one second, or up to 16 seconds if the run's agent hangs. A
        tick also calls user-defined objectives and, before the first trial of a new model, may trace that model.

        Raises:
            StudyError: The storage is unreachable, or almost no settings in the space can be run.
        """
        if self.seed is not None:
            self.retry(self.seed)
            self.seed = None
        for live in list(self.live.values()):
            self._follow(live)
        if time.monotonic() - self._recovered_at > min(_RECOVER_EVERY_S, recovery.beat_s()):
            self.retry(self._recover)
            self._recovered_at = time.monotonic()
        if time.monotonic() - self._read_at > _READ_EVERY_S:
            while not self._stopping and len(self.live) < self.parallel:
                if not self._start():
                    self._read_at = time.monotonic()
                    break
                if self._repeats:
                    break  # so that whoever calls this can stop a study whose sampler repeats itself
        return bool(self.live) or self._unsettled is not None or not (self._stopping or self._is_over)

    def stop(self) -> None:
        """Stop the runs; their trials are rerun first when the study is resumed.

        Returns even if the storage is unreachable: the next driver of the study detects the interrupted trials.
        """
        self._stopping = True
        self.retry.given_up.set()
        left = [*self.live, *([] if self._begun is None else [self._begun])]
        super().stop()
        self._begun = self._unsettled = None
        if left:
            within(TOLD_WITHIN_S, self.retry, self._leave, left)
        recovery.resign(self._identity)

    def _leave(self, numbers: list[int]) -> None:
        for number in numbers:
            self._mark_for_retry(number, "the study was stopped")

    def can_prune(self, number: int) -> bool:
        """Return whether this driver is running the trial, so that `prune` can stop it."""
        return number in self.live

    def prune(self, number: int, reason: str = "pruned by hand") -> None:
        """Stop a trial of this driver and count it as pruned.

        Raises:
            StudyError: This driver is not running the trial.
        """
        if number not in self.live:
            raise StudyError(f"trial {number} is not running here; running: {sorted(self.live) or 'none'}")
        self._prune_run(self.live[number], reason)

    # Starting.

    def _start(self) -> bool:
        """Start a trial, or recheck the trial whose start is undecided; return False if none can be started now."""
        trials = self.retry(self._read_trials)
        ended = recovery.ended(trials)
        left = settings_left(self._settings, trials, self._repeats)
        is_used_up = left == [] and all(trial.state.is_finished() for trial in trials)
        self._is_over = ended >= self.trials or is_used_up
        if self._is_over and ended < self.trials:
            self.used_up = used_up_text(self._settings, ended)
        try:
            if self._unsettled is None:
                if recovery.begun(trials) >= self.trials or (trial := self._next(trials, left)) is None:
                    return False
                self._begun = trial.number
                self.retry(trial.set_user_attr, DRIVER, self._identity)
                self._unsettled = trial, time.monotonic() + _SETTLE_S
            if not self._settle(*self._unsettled):
                return False
        except UpdateFinishedTrialError:
            self._unsettled = None  # taken over by another driver while the storage was unreachable
        self._begun = None
        return True

    def _read_trials(self) -> list[FrozenTrial]:
        trials = self.study.get_trials(deepcopy=False)
        if recovery.replace_lost(self.study, trials):
            trials = self.study.get_trials(deepcopy=False)
        return trials

    def _next(self, trials: list[FrozenTrial], left: list[Settings] | None) -> optuna.Trial | None:
        """Return a trial to retry, else a rerun that the user requested, else a new trial; None if no slot is left."""
        open_slots = self.trials - len(recovery.slots(trials))
        for number in [*recovery.retries(trials), *(recovery.asked_again(trials) if open_slots > 0 else [])]:
            held = self.retry(self.writer.take, number)
            if held is not None:
                return self.retry(optuna.Trial, self.study, held)
        if open_slots <= 0 or left == []:
            return None
        if left and (self._repeats or len(left) <= open_slots):
            chosen = random.Random(len(trials)).choice(left)
            self.retry(self.study.enqueue_trial, chosen, user_attrs={DRAWN: True})
        elif self.choose is not None:
            self.retry(self.choose.before_asking, self.study, trials)
        return self.retry(self.study.ask)

    def _settle(self, trial: optuna.Trial, deadline: float) -> bool:
        """Launch a trial, or cancel it if several drivers started too many; return False while this is undecided.

        Of two trials that compete for the last slot, the later is cancelled. Later ticks check again until `deadline`.
        """
        trials = self.retry(self.study.get_trials, deepcopy=False)
        reason, is_sure = recovery.over_budget(trial.number, trials, self.trials)
        if not is_sure and time.monotonic() <= deadline:
            return False
        self._unsettled = None
        if reason is None:
            self._begin(trial)
        else:
            self._tell(trial, None, TrialState.FAIL, {REASON: reason, NOT_COUNTED: OVER_BUDGET})
        return True

    def _begin(self, trial: optuna.Trial) -> None:
        """Sample the settings of a trial and start its run."""
        try:
            params = self._draw(trial)
            earlier = tried_before(trial.number, self.retry(self.study.get_trials, deepcopy=False))
            if earlier is not None:
                self._repeats += 1
                reason = f"trial {earlier} has the same settings"
                self._tell(trial, None, TrialState.FAIL, {REASON: reason, NOT_COUNTED: OVER_BUDGET})
                return
            job = self._job(trial, params)
        except SpecError as error:
            self._tell_impossible(trial, str(error))
            return
        self._impossible = self._repeats = 0
        self._launch(trial, params, job)

    def _draw(self, trial: optuna.Trial) -> dict[str, Value]:
        """Sample the settings of a trial, which also stores them, and return them.

        Raises:
            SpecError: The trial was queued with a value outside the space.
        """
        asked = [trial]

        def draw() -> dict[str, Value]:
            if not asked:  # a retry after an outage: the storage may hold unconfirmed values
                asked.append(optuna.Trial(self.study, self.writer.id_of(trial.number)))
            return suggest(asked.pop(), self.definition)

        return self.retry(draw)

    def _job(self, trial: optuna.Trial, params: Mapping[str, Value]) -> Job:
        """Return the job of a trial.

        Raises:
            SpecError: The job is invalid, or cannot run on this machine.
        """
        name = f"trial-{trial.number:04d}"
        job = evaluated(apply(self.definition.job, params, equal=self.definition.equal)).replace(name=name)
        fault = self.feasibility.fault(job) if self.feasibility is not None else None
        if fault is not None:
            raise SpecError(fault)
        return checked_rows(job)

    def _tell_impossible(self, trial: optuna.Trial, reason: str) -> None:
        self.retry(constrain, trial, 1.0)
        self._tell(trial, None, TrialState.PRUNED, {REASON: reason, NOT_COUNTED: IMPOSSIBLE})
        self._impossible += 1
        if self._impossible >= _MOST_IMPOSSIBLE:
            raise StudyError(
                f"{_MOST_IMPOSSIBLE} trials in a row could not be run, the last because {reason}; narrow the space"
            )

    def _launch(self, trial: optuna.Trial, params: Mapping[str, Value], job: Job) -> None:
        self.retry(constrain, trial, 0.0)
        try:
            run = launch(job, root=self.folder, gated=self.pruner is not None, preflight=False)
        except BrokenPipeError:  # its launch server was just killed; the next launch starts another
            if not self._may_retry(trial.number):
                raise
            self.retry(self._mark_for_retry, trial.number, "its launch server was killed", was_killed=True)
            return
        except LaunchError as error:
            raise recovery.not_launched(trial.number, error) from error
        self.live[trial.number] = Live(run, TrialReader(run), trial, params, job)
        self._write(self.live[trial.number], RUN, str(run.path))

    # Watching.

    def _watch(self, live: Live) -> None:
        if time.monotonic() - live.beat > recovery.beat_s():
            live.beat = time.monotonic()
            self._write(live, recovery.HEARTBEAT, time.time())
        if (
            live.number in self.live
            and self.pruner is not None
            and live.meter.num_evaluations > live.decided_at
        ):
            live.decided_at = live.meter.num_evaluations
            trials = self.retry(self.study.get_trials, deepcopy=False)
            reason = self.retry(self.pruner.reason, live, trials)
            if reason is None:
                # Without approval (full disk, no folder), the run waits for the time of one step and then continues.
                with suppress(OSError, SpecError):
                    live.run.approve(live.measured.curve[-1][0])
            else:
                self._prune_run(live, reason)

    def _write(self, live: Live, name: str, value: Any) -> None:
        """Set an attribute of a running trial; stop its run if another driver has taken over the trial."""
        try:
            self.retry(live.trial.set_user_attr, name, value)
        except UpdateFinishedTrialError:
            live.run.stop(GRACE_S)
            self._drop(live)

    def _drop(self, live: Live) -> None:
        self.live.pop(live.number, None)
        self._read_at = -math.inf

    def _prune_run(self, live: Live, reason: str) -> None:
        live.run.stop(GRACE_S)
        live.meter.read()
        self._tell_measured(live, None, TrialState.PRUNED, reason)

    def _finish(self, live: Live) -> None:
        """Record the result of a run that has ended."""
        state, error = live.run.state, live.run.error
        if state == "completed":
            self._complete(live)
        elif state == "stopped" and live.run.cause is Cause.REQUESTED:
            self._tell_measured(live, None, TrialState.PRUNED, "its run was stopped by hand")
        elif (state == "stopped" or was_killed(live.run)) and self._may_retry(live.number):
            self.retry(self._mark_for_retry, live.number, _sentence(error), was_killed=True)
            self._drop(live)
        else:
            self._tell_measured(live, None, TrialState.FAIL, _sentence(error))

    def _complete(self, live: Live) -> None:
        self._tell_measured(live, *self._result(live.run, live.measured))

    def _result(self, run: Run, measured: TrialMetrics) -> tuple[list[float] | None, TrialState, str | None]:
        """Return the values of a completed run, its trial's state, and a sentence on invalid values (None if valid)."""
        values, fault = values_of(self.definition.objectives, run, measured, self.own)
        if fault is not None:
            return None, TrialState.FAIL, fault
        return list(values.values()), TrialState.COMPLETE, None

    # Recording results.

    def _tell_measured(
        self, live: Live, values: list[float] | None, state: TrialState, reason: str | None
    ) -> None:
        self._report(live)
        self._tell(live.trial, values, state, _measured_attrs(live.measured, reason))
        self._drop(live)

    def _report(self, live: Live) -> None:
        if isinstance(self.pruner, Reporting):
            with suppress(
                UpdateFinishedTrialError
            ):  # another driver has taken over the trial, so its result counts
                self.retry(self.pruner.report, live)

    def _tell(
        self, trial: optuna.Trial, values: list[float] | None, state: TrialState, attrs: Mapping[str, Any]
    ) -> None:
        self.retry(self.writer.end, trial.number, state, values, attrs)

    def _may_retry(self, number: int) -> bool:
        trials = self.retry(self.study.get_trials, deepcopy=False)
        return recovery.attempts(trials, number) < MOST_ATTEMPTS

    def _mark_for_retry(self, number: int, reason: str, *, was_killed: bool = False) -> None:
        recovery.mark_for_retry(self.writer, number, reason, was_killed=was_killed)
        recovery.replace_lost(self.study, self.study.get_trials(deepcopy=False))

    def _recover(self) -> None:
        """Take over the trials of dead drivers."""
        trials = self.study.get_trials(deepcopy=False)
        for trial in self._heartbeats.gone([trial for trial in trials if trial.number not in self.live]):
            self._adopt(trial, trials)
        recovery.replace_lost(self.study, self.study.get_trials(deepcopy=False))

    def _adopt(self, trial: FrozenTrial, trials: list[FrozenTrial]) -> None:
        """Take over a trial: record its result if its run has completed, else mark it for a retry."""
        run = self._run_of(trial)
        excess = None if trial.params else recovery.over_budget(trial.number, trials, self.trials)[0]
        if excess is not None:  # the driver died before it could cancel this excess trial
            self.writer.end(trial.number, TrialState.FAIL, None, {REASON: excess, NOT_COUNTED: OVER_BUDGET})
        elif run is not None and run.state == "completed":
            measured = self._measured_of(trial, run)
            values, state, fault = self._result(run, measured)
            self.writer.end(trial.number, state, values, _measured_attrs(measured, fault))
        else:
            recovery.mark_for_retry(self.writer, trial.number, "its driver ended before the run did")
            if run is not None:
                RunDir(run.path).request_stop(GRACE_S)  # the driver may be dead while the run still lives

    def _measured_of(self, trial: FrozenTrial, run: Run) -> TrialMetrics:  # noqa: ARG002 - used by HalvingDriver
        return TrialReader(run).poll()

    def _run_of(self, trial: FrozenTrial) -> Run | None:
        path = trial.user_attrs.get(RUN)
        return None if path is None else self._attached(path)

    def _has(self, run: str) -> bool:
        return self._attached(run) is not None

    def _attached(self, run: str) -> Run | None:
        """Return the run at a path read from the storage; None if it is unreadable or outside this driver's folder."""
        try:
            return Run.attach(run) if recovery.is_among(run, self.folder) else None
        except RunNotFound:
            return None


def _measured_attrs(measured: TrialMetrics, reason: str | None) -> dict[str, Any]:
    return {MEASURED: measured_to(measured), **({} if reason is None else {REASON: reason})}


def was_killed(run: Run) -> bool:
    """Return whether the run was ended from outside: a process was killed or never started, and no rank failed."""
    return run.cause in (Cause.KILLED, Cause.NOT_STARTED)


def _sentence(error: ShardscopeError | None) -> str:
    return str(error).splitlines()[0] if error is not None else "its run was ended from outside"
