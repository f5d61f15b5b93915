"""The driver of a study whose trials pause at rungs and resume from their checkpoints.

Optuna lists a paused trial as running, so samplers take it into account. Its last piece has ended, and its
attributes record the rung that it has reached. Only the driver that started a trial promotes it. When that driver stops
or is killed, a successor takes the trial's place, as for any running trial (see `recovery`). The successor takes over
the runs so far and resumes from the last checkpoint; if the checkpoints are on another machine, it trains from scratch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import LaunchError, RunNotFound
from shardscope.runtime import launch
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import this_host
from shardscope.spec import Job
from shardscope.spec.space import Value
from shardscope.tuning import recovery
from shardscope.tuning.apply import apply
from shardscope.tuning.driver import TOLD_WITHIN_S, Live, TrialDriver
from shardscope.tuning.measured import TrialMetrics, TrialReader
from shardscope.tuning.pruning import halving
from shardscope.tuning.pruning.halving import JobOf, Paused, Rungs
from shardscope.tuning.records import MEASURED, REASON, RUN, from_study, is_paused, measured_to
from shardscope.tuning.recovery import not_launched
from shardscope.tuning.samplers import constrain
from shardscope.tuning.storage import within


@dataclass
class Held:
    """A trial that this driver has paused."""

    trial: optuna.Trial
    params: Mapping[str, Value]
    job: Job
    meter: TrialReader
    paused: Paused


@dataclass
class HalvingDriver(TrialDriver):
    """Driver that runs trials in pieces, and only the best trials to their end.

    `rungs` are the points at which trials pause, and `held` maps the numbers of the paused trials to their state.
    """

    rungs: Rungs = field(default_factory=Rungs)
    held: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._beat = time.monotonic()
        self._swept: set[str] = set()
        self._is_swept = False

    # What to do next.

    def tick(self) -> bool:
        if time.monotonic() - self._beat > recovery.beat_s():
            self._beat = time.monotonic()
            for number in list(self.held):
                if not self.retry(self.writer.write, number, {recovery.HEARTBEAT: time.time()}):
                    del self.held[number]  # another driver has taken over the trial
        has_more = super().tick()
        if not self._is_swept:
            self._sweep()
        return has_more

    def _sweep(self) -> None:
        """Delete checkpoints that no trial will resume from any more, unless the user's job asks for checkpoints."""
        self._is_swept = True
        asked = self.definition.job.checkpoint
        if asked.every is None and not asked.at_end:
            trials = self.retry(self.study.get_trials, deepcopy=False)
            for run in halving.unneeded(trials) - self._swept:
                halving.delete(run, self.folder)
                self._swept.add(run)

    def _start(self) -> bool:
        if (
            self._unsettled is not None
        ):  # else a promotion could take the place of a trial that has no run yet
            return super()._start()
        state = self._rung_state() if self.held else None
        number = None if state is None else halving.promotable(*state)
        if number is not None:
            self._promote(number)
            return True
        return super()._start() or (bool(self.held) and not self.live and self._end())

    def _rung_state(self) -> tuple[list[FrozenTrial], dict[int, int], Rungs, tuple[str, ...], JobOf]:
        trials = self.retry(self.study.get_trials, deepcopy=False)
        for trial in trials:
            if trial.state.is_finished():
                self.held.pop(trial.number, None)  # another driver has taken over the trial
        at_rung = {number: held.paused.rung for number, held in self.held.items()}
        return trials, at_rung, self.rungs, self.definition.objectives, self._job_of

    def _job_of(self, trial: FrozenTrial) -> Job:
        settings = from_study(trial.params, self.definition.space)
        return apply(self.definition.job, settings, equal=self.definition.equal)

    def _end(self) -> bool:
        """Promote the best paused trial if no trial is complete, else prune all paused trials.

        Called when nothing is left to start. Returns whether anything was done.
        """
        state = self._rung_state()
        if not self.held:
            return False
        if any(trial.state == TrialState.RUNNING and not is_paused(trial) for trial in state[0]):
            return False  # another driver's trial may still reach a rung, after which more trials may be promoted
        if not any(trial.state == TrialState.COMPLETE for trial in state[0]):
            number = halving.furthest(*state)
            if number is not None:
                self._promote(number)
            return number is not None
        for number, held in list(self.held.items()):
            share = self.rungs.shares[held.paused.rung]
            self._give_up(number, f"not among the best 1 in {self.rungs.eta} at {share:.0%} of its samples")
        return True

    # Pieces.

    def _launch(self, trial: optuna.Trial, params: Mapping[str, Value], job: Job) -> None:
        paused = Paused.of(trial.user_attrs)
        if paused is not None and self._is_here(paused):
            self.retry(constrain, trial, 0.0)
            self.retry(trial.set_user_attr, RUN, paused.runs[-1])
            self.held[trial.number] = Held(trial, params, job, meter_of(paused.runs), paused)
            return
        super()._launch(trial, params, self._until(job, 0))

    def _until(self, job: Job, rung: int) -> Job:
        until = self.rungs.untils(job.steps)[rung]
        return job.replace(until=until if until < job.steps else None)

    def _promote(self, number: int) -> None:
        held = self.held[number]
        job = self._until(held.job, held.paused.rung + 1)
        try:
            resume = Path(held.paused.runs[-1])
            run = launch(job, root=self.folder, resume=resume, gated=self.pruner is not None, preflight=False)
        except BrokenPipeError:
            return  # its launch server was just killed; the next tick starts another one
        except LaunchError as error:
            raise not_launched(number, error) from error
        except RunNotFound as error:
            del self.held[number]
            self._tell(held.trial, None, TrialState.FAIL, {REASON: str(error)})
            return
        del self.held[number]
        held.meter.continue_with(run)
        held.meter.read()
        self.live[number] = Live(run, held.meter, held.trial, held.params, job)
        self.live[number].decided_at = held.meter.num_evaluations
        self._write(self.live[number], RUN, str(run.path))

    def _complete(self, live: Live) -> None:
        if live.run.job.until is None:
            super()._complete(live)
            return
        self._report(live)
        earlier = self._paused(live.number)
        paused = self._after(earlier, live.run)
        attrs = {MEASURED: measured_to(live.measured), **paused.to_attrs()}
        if self.retry(self.writer.write, live.number, attrs):  # else another driver has taken over the trial
            self.held[live.number] = Held(live.trial, live.params, live.job, live.meter, paused)
        self._is_swept = False
        self._drop(live)

    def _paused(self, number: int) -> Paused | None:
        trials = self.retry(self.study.get_trials, deepcopy=False)
        return next(Paused.of(trial.user_attrs) for trial in trials if trial.number == number)

    def _after(self, earlier: Paused | None, run: Run) -> Paused:
        rung = self.rungs.untils(run.job.steps).index(run.job.last_step)
        runs = () if earlier is None or not self._is_here(earlier) else earlier.runs
        return Paused(rung, run.job.steps, (*runs, str(run.path)), this_host())

    # Ends.

    def can_prune(self, number: int) -> bool:
        return number in self.held or super().can_prune(number)

    def prune(self, number: int, reason: str = "pruned by hand") -> None:
        if number in self.held:
            self._give_up(number, reason)
        else:
            super().prune(number, reason)

    def _give_up(self, number: int, reason: str) -> None:
        held = self.held.pop(number)
        attrs = {REASON: reason, MEASURED: measured_to(held.meter.poll())}
        self._tell(held.trial, None, TrialState.PRUNED, attrs)

    def _tell(
        self, trial: optuna.Trial, values: list[float] | None, state: TrialState, attrs: Mapping[str, Any]
    ) -> None:
        super()._tell(trial, values, state, attrs)
        self._is_swept = False

    def stop(self) -> None:
        super().stop()
        paused = list(self.held)
        self.held.clear()  # these trials stay paused; the driver that resumes the study takes them over
        if paused:
            within(TOLD_WITHIN_S, self.retry, recovery.leave, self.writer, paused, self._identity)

    # Trials of drivers that no longer run.

    def _adopt(self, trial: FrozenTrial, trials: list[FrozenTrial]) -> None:
        self._is_swept = False
        run, earlier = self._run_of(trial), Paused.of(trial.user_attrs)
        if run is None or run.state != "completed" or run.job.until is None:
            super()._adopt(trial, trials)
            return
        if earlier is None or str(run.path) not in earlier.runs:
            paused = self._after(earlier, run)
            measured = meter_of(paused.runs).poll()
            self.writer.write(trial.number, {MEASURED: measured_to(measured), **paused.to_attrs()})
        recovery.mark_for_retry(self.writer, trial.number, "its driver ended before the trial did")

    def _measured_of(self, trial: FrozenTrial, run: Run) -> TrialMetrics:
        earlier = Paused.of(trial.user_attrs)
        runs = () if earlier is None or not self._is_here(earlier) else earlier.runs
        return meter_of((*runs, str(run.path))).poll()

    def _is_here(self, paused: Paused) -> bool:
        return paused.host == this_host() and all(map(self._has, paused.runs))


def meter_of(runs: tuple[str, ...]) -> TrialReader:
    """Return a reader that has read all pieces of a trial, given the run paths of the pieces in order."""
    first, *others = (Run.attach(path) for path in runs)
    meter = TrialReader(first)
    meter.poll()
    for run in others:
        meter.continue_with(run)
        meter.poll()
    return meter
