"""Recovery of trials whose driver is dead: no trial is lost, and none is counted twice.

Every running trial records its driver (machine, process, driver within the process) and a heartbeat. A driver
counts as dead if its process has ended, if it has left the study, or if its heartbeat stops. A driver whose process is
known to be alive may be silent for longer than a driver on another machine.

Any driver that detects a dead driver takes over its trials, in two steps. First it ends the trial. The storage allows
this only once, so only one of several drivers succeeds. If the run had completed, its metrics are recorded; if not, the
trial fails. Second, the driver queues a successor with the same settings for a trial that failed. If the driver dies
between the two steps, the next check queues the successor. If two drivers each queue a successor, only the first
counts.

A study has a slot for each of its trials. A sampled trial opens a slot, and its successors inherit it.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import LaunchError, StudyError
from shardscope.runtime.record.processes import is_alive, process_started
from shardscope.runtime.record.rundir import this_host
from shardscope.tuning.records import (
    AGAIN,
    DRIVER,
    MEASURED,
    NOT_COUNTED,
    ORIGIN,
    PAUSED,
    REASON,
    RETRY_OF,
    SAMPLER,
    SEED,
    TrialWriter,
    not_counted,
)

HEARTBEAT = "heartbeat"
SILENCE_VARIABLE = "SHARDSCOPE_SILENCE_S"
SILENCE_S = 75.0
"""Default time without a heartbeat after which a driver on another machine counts as dead, in seconds."""
_BEATS = 5
"""Number of heartbeats within `SILENCE_S`. A running trial without a driver is taken over after one heartbeat."""
_ALIVE_FACTOR = 10
"""Factor by which a driver with a live process may be silent for longer, because user-defined objectives may be
slow."""
_LEFT = "left"
"""Key in a trial's driver entry. If set, the driver has left the study, and its paused trials may be taken over."""
LOST = "lost"
TAKEN = "another trial with the same settings was queued first"
KILLED = "killed"
"""Attribute that marks a trial whose run was killed. Only killed trials count as attempts; stopped trials do not."""
CARRIED = (PAUSED, MEASURED)
"""Attributes with the progress of a trial that is trained in pieces; its successor inherits them."""

_here: set[str] = set()
"""Names of the drivers in this process that have not left their study."""


def silence_s() -> float:
    """Return the number of seconds without a heartbeat after which a driver on another machine counts as dead."""
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE_S))


def beat_s() -> float:
    """Return the time between two heartbeats of a driver, in seconds."""
    return silence_s() / _BEATS


def enrol(driver: object) -> dict[str, Any]:
    """Return a globally unique entry that names a driver of this process.

    The driver counts as alive until it resigns or is deleted.
    """
    name = uuid.uuid4().hex
    _here.add(name)
    weakref.finalize(driver, _here.discard, name)
    return {"host": this_host(), "pid": os.getpid(), "process_started": process_started(), "driver": name}


def resign(name: dict[str, Any]) -> None:
    """Leave the study: any other driver may take over the trials that still carry this name."""
    _here.discard(name["driver"])


def leave(writer: TrialWriter, numbers: list[int], name: dict[str, Any]) -> None:
    """Release paused trials: any driver may take them over, even if this driver's process stays alive."""
    for number in numbers:
        writer.write(number, {DRIVER: {**name, _LEFT: True}})


@dataclass
class Watch:
    """Heartbeats of other drivers as one driver observes them, timed by the observer's clock."""

    seen: dict[int, tuple[Any, float]] = field(default_factory=dict)
    looked_at: float = 0.0

    def gone(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return the running trials whose driver is dead."""
        now = time.monotonic()
        if now - self.looked_at > beat_s() * 2:
            self.seen.clear()  # no heartbeat could arrive while the storage or this process was blocked
        self.looked_at = now
        return [trial for trial in trials if trial.state == TrialState.RUNNING and self._is_gone(trial, now)]

    def _is_gone(self, trial: FrozenTrial, now: float) -> bool:
        driver = trial.user_attrs.get(DRIVER)
        retry = beat_s() if driver is None else silence_s()
        if driver is not None and driver.get(_LEFT):
            return True
        if driver is not None and driver["host"] == this_host():
            if not _is_alive(driver):
                return True
            retry *= _ALIVE_FACTOR
        beat = (driver, trial.user_attrs.get(HEARTBEAT))
        last, since = self.seen.get(trial.number, (None, now))
        if last != beat:
            self.seen[trial.number] = (beat, now)
            return False
        return now - since > retry


def _is_alive(driver: dict[str, Any]) -> bool:
    """Return whether a driver on this machine has a live process and has not left the study."""
    if not is_alive(driver["pid"], driver["process_started"]):
        return False
    return driver["pid"] != os.getpid() or driver["driver"] in _here


# Slots and their trials.


def successors(trials: list[FrozenTrial]) -> dict[int, list[int]]:
    """Return the numbers of the successors of each retried trial, in order, keyed by the retried trial's number."""
    found: dict[int, list[int]] = {}
    for trial in trials:
        earlier = trial.user_attrs.get(RETRY_OF)
        if earlier is not None:
            found.setdefault(earlier, []).append(trial.number)
    return found


def is_surplus(trial: FrozenTrial, trials: list[FrozenTrial]) -> bool:
    """Return whether a trial retries another trial that already has an earlier successor."""
    earlier = trial.user_attrs.get(RETRY_OF)
    return earlier is not None and successors(trials)[earlier][0] != trial.number


def slots(trials: list[FrozenTrial]) -> dict[int, FrozenTrial]:
    """Return the newest trial in each slot of a study, keyed by the number of the trial that opened the slot.

    A queued trial has no slot yet. An impossible or surplus trial has given up its slot.
    """
    following = {number: line[0] for number, line in successors(trials).items()}
    by_number = {trial.number: trial for trial in trials}
    held: dict[int, FrozenTrial] = {}
    for trial in trials:
        if RETRY_OF in trial.user_attrs or trial.state == TrialState.WAITING:
            continue
        last = trial
        while last.number in following:
            last = by_number[following[last.number]]
        if not_counted(last) in {None, LOST}:
            held[trial.number] = last
    return held


def begun(trials: list[FrozenTrial]) -> int:
    """Return the number of slots whose newest trial has started and counts towards the number of trials."""
    return sum(_is_begun(last) for last in slots(trials).values())


def ended(trials: list[FrozenTrial]) -> int:
    """Return the number of slots whose newest trial has ended and counts towards the number of trials."""
    return sum(_is_begun(last) and last.state.is_finished() for last in slots(trials).values())


def retries(trials: list[FrozenTrial]) -> list[int]:
    """Return the numbers of the waiting successors of lost trials."""
    return [last.number for last in slots(trials).values() if last.state == TrialState.WAITING]


def asked_again(trials: list[FrozenTrial]) -> list[int]:
    """Return the numbers of the waiting trials that the user asked to rerun."""
    return [
        trial.number
        for trial in trials
        if trial.state == TrialState.WAITING
        and trial.user_attrs.get(ORIGIN) == AGAIN
        and RETRY_OF not in trial.user_attrs
    ]


def over_budget(number: int, trials: list[FrozenTrial], wanted: int) -> tuple[str | None, bool]:
    """Return why a newly started trial must be cancelled (None: run it), and whether that decision is final.

    If two drivers start the last trial at the same moment, the trial with the higher number is cancelled. However, a
    queued trial has a low number even if it started after the other one was launched. A queued trial is therefore
    also cancelled if all slots are still occupied a moment later.

    Args:
        number: Number of the new trial.
        trials: All trials of the study.
        wanted: Number of trials that the study is to have.
    """
    own = next(trial for trial in trials if trial.number == number)
    if is_surplus(own, trials) or _is_seed_again(own, trials):
        return TAKEN, True
    if RETRY_OF in own.user_attrs:
        return None, True
    others = [slot for slot in slots(trials) if slot != number]
    is_last = sum(slot < number for slot in others) >= wanted
    if is_last or ("fixed_params" in own.system_attrs and len(others) >= wanted):
        return "other drivers started the last trials at the same moment", is_last
    return None, True


def _is_seed_again(trial: FrozenTrial, trials: list[FrozenTrial]) -> bool:
    """Return whether another driver queued the same seed earlier."""
    seed = trial.user_attrs.get(SEED)
    return seed is not None and any(
        other.number < trial.number and other.user_attrs.get(SEED) == seed for other in trials
    )


def _is_begun(last: FrozenTrial) -> bool:
    return last.state != TrialState.WAITING and not_counted(last) is None


def attempts(trials: list[FrozenTrial], number: int) -> int:
    """Return the number of attempts at a trial: 1, plus 1 for each killed predecessor."""
    by_number = {trial.number: trial for trial in trials}
    count, place = 1, by_number[number].user_attrs.get(RETRY_OF)
    while place is not None:
        attrs = by_number[place].user_attrs
        count, place = count + bool(attrs.get(KILLED)), attrs.get(RETRY_OF)
    return count


# Taking over.


def is_among(run: str, folder: Path) -> bool:
    """Return whether a run path read from a storage lies in the folder of the driver's own trials.

    Anyone with write access to the storage can put any path there, so nothing outside the folder is read, resumed or
    deleted.
    """
    return folder.resolve() in Path(run).resolve().parents


def mark_for_retry(writer: TrialWriter, number: int, reason: str, *, was_killed: bool = False) -> bool:
    """Fail a running trial that is to be retried; return False if another driver has already ended it."""
    attrs: dict[str, Any] = {REASON: reason, NOT_COUNTED: LOST}
    if was_killed:
        attrs[KILLED] = True
    return writer.end(number, TrialState.FAIL, None, attrs)


def replace_lost(study: optuna.Study, trials: list[FrozenTrial]) -> int:
    """Queue a successor for every trial that is marked for a retry and has none; return the number queued."""
    known = successors(trials)
    missing = [
        trial
        for trial in trials
        if not_counted(trial) == LOST and trial.number not in known and not is_surplus(trial, trials)
    ]
    for trial in missing:
        params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        attrs = {RETRY_OF: trial.number, ORIGIN: trial.user_attrs.get(ORIGIN, "drawn")}
        if SAMPLER in trial.user_attrs:
            attrs[SAMPLER] = trial.user_attrs[SAMPLER]
        if PAUSED in trial.user_attrs:
            attrs |= {name: trial.user_attrs[name] for name in CARRIED if name in trial.user_attrs}
        study.enqueue_trial(params, user_attrs=attrs)
    return len(missing)


def not_launched(number: int, error: LaunchError) -> StudyError:
    """Return the error that ends a driver because this machine cannot launch runs, often due to a full disk."""
    return StudyError(
        f"trial {number} could not be launched: {error}; it will run first when the study is resumed"
    )
