"""Trials whose driver is gone: nothing of them is lost, and none is counted twice.

Every running trial names its driver (machine, process, which driver in it) and carries a heartbeat. A driver is gone
if its process is, or if it says that it has left the study, or if its heartbeat stands still: soon where it runs on
another machine, late where its process is seen to live. Whoever notices takes the trial over in two steps that the
storage itself makes safe: a trial can be finished only once, so of several that try, one succeeds. If the run had
ended, its figures are told. If not, the trial fails, and another with the same settings takes its place and says so;
should the taker die between the two, or two add one each, the next look finds that: the first of a trial's successors
counts, and no other.

So a study's trials stand in places. A place is begun by a trial that was drawn, and kept by its line of successors.
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

from shardscope.runtime.processes import is_alive, process_started
from shardscope.runtime.rundir import this_host
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
    Ledger,
    not_counted,
)

HEARTBEAT = "heartbeat"
SILENCE_VARIABLE = "SHARDSCOPE_SILENCE_S"
SILENCE_S = 75.0
"""How long the heartbeat of a driver elsewhere may stand still, where the environment does not say otherwise."""
_BEATS = 5
"""Heartbeats within that time. A trial that nobody has put a name to was dropped: one of them is long enough."""
_LIVING = 10
"""How many times longer, where the process is seen to live: an objective of the user's may take its time."""
_LEFT = "left"
"""In the name of a trial's driver: it has left the study, and what it had paused is anybody's."""
LOST = "lost"
SURPLUS = "surplus"
TAKEN = "another trial has taken the same place already"
KILLED = "killed"
"""Marks a trial whose run was killed, by which attempts are counted: stopping a study uses none up."""
CARRIED = (PAUSED, MEASURED)
"""What the successor of a trial that is trained in pieces takes over: how far these had come."""

_here: set[str] = set()
"""The drivers of this process that have not left their study."""


def silence_s() -> float:
    """How long the heartbeat of a driver elsewhere may stand still."""
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE_S))


def beat_s() -> float:
    """How often a driver shows that it lives."""
    return silence_s() / _BEATS


def enrol(driver: object) -> dict[str, Any]:
    """A name for a driver of this process, for all who can see the storage; its own until it resigns or is no more."""
    name = uuid.uuid4().hex
    _here.add(name)
    weakref.finalize(driver, _here.discard, name)
    return {"host": this_host(), "pid": os.getpid(), "process_started": process_started(), "driver": name}


def resign(name: dict[str, Any]) -> None:
    """Leave the study: trials that still bear this name are anybody's."""
    _here.discard(name["driver"])


def leave(ledger: Ledger, numbers: list[int], name: dict[str, Any]) -> None:
    """Tell everybody that trials paused under this name are anybody's, though its process may live on."""
    for number in numbers:
        ledger.write(number, {DRIVER: {**name, _LEFT: True}})


@dataclass
class Watch:
    """What one driver has seen of the others' heartbeats, by its own clock."""

    seen: dict[int, tuple[Any, float]] = field(default_factory=dict)
    looked_at: float = 0.0

    def gone(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """The running trials among these whose driver is no more."""
        now = time.monotonic()
        if now - self.looked_at > beat_s() * 2:
            self.seen.clear()  # nobody could be heard while the storage, or this process, was away
        self.looked_at = now
        return [trial for trial in trials if trial.state == TrialState.RUNNING and self._is_gone(trial, now)]

    def _is_gone(self, trial: FrozenTrial, now: float) -> bool:
        driver = trial.user_attrs.get(DRIVER)
        patience = beat_s() if driver is None else silence_s()
        if driver is not None and driver.get(_LEFT):
            return True
        if driver is not None and driver["host"] == this_host():
            if not _lives(driver):
                return True
            patience *= _LIVING
        beat = (driver, trial.user_attrs.get(HEARTBEAT))
        last, since = self.seen.get(trial.number, (None, now))
        if last != beat:
            self.seen[trial.number] = (beat, now)
            return False
        return now - since > patience


def _lives(driver: dict[str, Any]) -> bool:
    """Whether a driver of this machine still has its process, and has not left the study."""
    if not is_alive(driver["pid"], driver["process_started"]):
        return False
    return driver["pid"] != os.getpid() or driver["driver"] in _here


# Places and who holds them.


def successors(trials: list[FrozenTrial]) -> dict[int, list[int]]:
    """The trials that were added in another's place, by that other's number, in order."""
    found: dict[int, list[int]] = {}
    for trial in trials:
        earlier = trial.user_attrs.get(RETRY_OF)
        if earlier is not None:
            found.setdefault(earlier, []).append(trial.number)
    return found


def is_surplus(trial: FrozenTrial, trials: list[FrozenTrial]) -> bool:
    """Whether a trial was added in the place of one that already has a successor."""
    earlier = trial.user_attrs.get(RETRY_OF)
    return earlier is not None and successors(trials)[earlier][0] != trial.number


def places(trials: list[FrozenTrial]) -> dict[int, FrozenTrial]:
    """The places of a study: the number of the trial that began each, and the last of its line.

    What waits in the queue has none yet, and what was impossible or surplus has given its own up.
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
    """Places whose trial runs or has ended."""
    return sum(_is_begun(last) for last in places(trials).values())


def ended(trials: list[FrozenTrial]) -> int:
    """Places whose trial has ended, and counts."""
    return sum(_is_begun(last) and last.state.is_finished() for last in places(trials).values())


def retries(trials: list[FrozenTrial]) -> list[int]:
    """Trials that wait to take a lost one's place."""
    return [last.number for last in places(trials).values() if last.state == TrialState.WAITING]


def asked_again(trials: list[FrozenTrial]) -> list[int]:
    """Trials that somebody has asked for by hand, and that wait."""
    return [
        trial.number
        for trial in trials
        if trial.state == TrialState.WAITING
        and trial.user_attrs.get(ORIGIN) == AGAIN
        and RETRY_OF not in trial.user_attrs
    ]


def surplus(number: int, trials: list[FrozenTrial], wanted: int) -> tuple[str | None, bool]:
    """Why a trial that has just been begun is to be given up, None to go on, and whether that is sure by now.

    Two drivers may begin the last trial at the same moment. The one with the higher number gives way. The other may
    have come from the queue after that one had gone on: where it still stands a moment later, the lower gives way.
    """
    own = next(trial for trial in trials if trial.number == number)
    if is_surplus(own, trials) or _is_seed_again(own, trials):
        return TAKEN, True
    if RETRY_OF in own.user_attrs:
        return None, True
    others = [place for place in places(trials) if place != number]
    is_last = sum(place < number for place in others) >= wanted
    if is_last or ("fixed_params" in own.system_attrs and len(others) >= wanted):
        return "other drivers had begun the last trials at the same moment", is_last
    return None, True


def _is_seed_again(trial: FrozenTrial, trials: list[FrozenTrial]) -> bool:
    """Whether two drivers have queued the same seed, and the other was first."""
    seed = trial.user_attrs.get(SEED)
    return seed is not None and any(
        other.number < trial.number and other.user_attrs.get(SEED) == seed for other in trials
    )


def _is_begun(last: FrozenTrial) -> bool:
    return last.state != TrialState.WAITING and not_counted(last) is None


def attempts(trials: list[FrozenTrial], number: int) -> int:
    """How often a trial has been begun that was killed, under this number and those whose place it took."""
    by_number = {trial.number: trial for trial in trials}
    count, place = 1, by_number[number].user_attrs.get(RETRY_OF)
    while place is not None:
        attrs = by_number[place].user_attrs
        count, place = count + bool(attrs.get(KILLED)), attrs.get(RETRY_OF)
    return count


# Taking over.


def is_among(run: str, folder: Path) -> bool:
    """Whether a run that a storage names lies in the folder of a driver's own trials.

    Whoever can write to the storage names what they like: elsewhere nothing is read, gone on from or deleted.
    """
    return folder.resolve() in Path(run).resolve().parents


def set_aside(ledger: Ledger, number: int, reason: str, *, was_killed: bool = False) -> bool:
    """End a running trial that is to be run again; False if somebody else has ended it."""
    attrs: dict[str, Any] = {REASON: reason, NOT_COUNTED: LOST}
    if was_killed:
        attrs[KILLED] = True
    return ledger.end(number, TrialState.FAIL, None, attrs)


def replace_lost(study: optuna.Study, trials: list[FrozenTrial]) -> int:
    """Add a successor for every trial that was set aside and has none; returns how many."""
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
