"""Records of a study's trials, readable from any machine at any time, and a ledger that writes to trials by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from shardscope.spec.space import PowersOfTwo, Space, Value
from shardscope.tuning.front import Front, front_of
from shardscope.tuning.measured import Measured

# Attributes of a trial in its study.
ORIGIN, DRIVER, RUN, REASON, MEASURED, RETRY_OF, NOT_COUNTED, PINNED, PAUSED, SAMPLER, SEED = (
    "origin", "driver", "run", "reason", "measured", "retry_of", "not_counted", "pinned", "paused", "sampler", "seed",
)  # fmt: skip
AGAIN = "again"
"""Origin of trials that are requested by hand; they run before other queued trials."""
_LOG2 = "log2({})"


def study_name(name: str, space: Space) -> str:
    """Return the name of a parameter in its study; a power of two is drawn by its exponent."""
    return _LOG2.format(name) if isinstance(space.parameters[name], PowersOfTwo) else name


def to_study(params: Mapping[str, Value], space: Space) -> dict[str, Any]:
    """Return settings in the form that the study stores."""
    return {
        study_name(name, space): int(str(value)).bit_length() - 1
        if isinstance(space.parameters[name], PowersOfTwo)
        else value
        for name, value in params.items()
    }


def from_study(params: Mapping[str, Any], space: Space) -> dict[str, Value]:
    """Return settings by the names of the space."""
    names = {study_name(name, space): name for name in space.parameters}
    return {
        names[held]: 2 ** int(value) if isinstance(space.parameters[names[held]], PowersOfTwo) else value
        for held, value in params.items()
        if held in names
    }


@dataclass(frozen=True)
class TrialRecord:
    """One trial.

    Attributes:
        state: ``waiting``, ``running``, ``paused`` (at a rung, with its checkpoint), ``complete``, ``pruned``,
            ``impossible`` (it cost no run), ``failed``, or ``unused`` (the study had all its trials before its turn
            came; it is run first if more are asked for).
        params: Settings by the names of the space.
        values: Values by objective; None unless complete.
        reason: Why it was pruned, impossible or failed, as one sentence.
        origin: ``drawn``, ``default``, ``baseline``, ``prior``, or ``again`` (requested by hand).
        run: Path of its run directory on the machine that ran it; the newest one if it was trained in pieces.
        measured: Figures of the run.
        retry_of: Number of the trial that it replaces.
        counted: Whether it counts towards the study's number of trials.
        sampler: Name of the sampler that drew the settings that were not given; None if all were given.
        pieces: Paths of all its runs, in order; several if it paused at rungs.
    """

    number: int
    state: str
    params: Mapping[str, Value]
    values: Mapping[str, float] | None
    reason: str | None
    origin: str
    run: str | None
    host: str | None
    measured: Measured | None
    retry_of: int | None
    counted: bool
    pinned: bool
    sampler: str | None = None
    pieces: tuple[str, ...] = ()

    @property
    def alarms(self) -> tuple[str, ...]:
        """Alarms about the layers of its run, as sentences."""
        return () if self.measured is None else self.measured.alarms


_STATES = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
IMPOSSIBLE, UNUSED = "impossible", "unused"
NOT_BEGUN = ("waiting", UNUSED)
_ENDED = ("complete", "pruned", "failed")


def not_counted(trial: FrozenTrial) -> str | None:
    """Return why a trial does not count towards the study; None if it does.

    The mark is written before the trial is ended, and another driver may end it in between. So the mark is ignored
    unless the final state agrees with it.
    """
    mark = trial.user_attrs.get(NOT_COUNTED)
    is_ended_so = trial.state == TrialState.FAIL or (trial.state == TrialState.PRUNED and mark == IMPOSSIBLE)
    return mark if is_ended_so else None


def record_of(
    trial: FrozenTrial, space: Space, objectives: Sequence[str], *, pinned: bool = False
) -> TrialRecord:
    """Return the record of one trial of a study."""
    attrs = trial.user_attrs
    state = "paused" if is_paused(trial) else _STATES[trial.state]
    mark = not_counted(trial)
    values = dict(zip(objectives, trial.values, strict=True)) if trial.values else None
    return TrialRecord(
        number=trial.number, state=IMPOSSIBLE if mark == IMPOSSIBLE else state,
        params=from_study(trial.params or trial.system_attrs.get("fixed_params", {}), space),
        values=values, reason=attrs.get(REASON), origin=attrs.get(ORIGIN, "drawn"), run=attrs.get(RUN),
        host=(attrs.get(DRIVER) or {}).get("host"), measured=measured_from(attrs.get(MEASURED)),
        retry_of=attrs.get(RETRY_OF), counted=mark is None, pinned=pinned,
        sampler=attrs.get(SAMPLER), pieces=_pieces(attrs),
    )  # fmt: skip


def _pieces(attrs: Mapping[str, Any]) -> tuple[str, ...]:
    earlier, newest = (attrs.get(PAUSED) or {}).get("runs", ()), attrs.get(RUN)
    return tuple(dict.fromkeys([*earlier, *([] if newest is None else [newest])]))


def is_paused(trial: FrozenTrial) -> bool:
    """Return whether a trial that Optuna sees as running is paused: its newest run is its last completed piece."""
    held = trial.user_attrs.get(PAUSED)
    return (
        held is not None
        and trial.state == TrialState.RUNNING
        and held["runs"][-1] == trial.user_attrs.get(RUN)
    )


def records_of(
    study: optuna.Study, space: Space, objectives: Sequence[str], *, wanted: int | None = None
) -> list[TrialRecord]:
    """Return the records of all trials of a study, sorted by number.

    After `wanted` trials have ended, waiting trials are ``unused``, except retries and those requested by hand.
    """
    marks = study.user_attrs
    found = [
        record_of(trial, space, objectives, pinned=bool(marks.get(f"{PINNED}:{trial.number}")))
        for trial in study.get_trials(deepcopy=False)
    ]
    if wanted is None or sum(record.counted and record.state in _ENDED for record in found) < wanted:
        return found
    return [
        _unused(r) if r.state == "waiting" and r.retry_of is None and r.origin != AGAIN else r for r in found
    ]


def _unused(record: TrialRecord) -> TrialRecord:
    reason = "the study had all its trials before its turn came"
    return replace(record, state=UNUSED, counted=False, reason=reason)


def measured_to(measured: Measured) -> dict[str, Any]:
    """Return figures as an attribute of a trial."""
    return asdict(measured)


def measured_from(value: Mapping[str, Any] | None) -> Measured | None:
    """Return the figures that `measured_to` stored."""
    if value is None:
        return None
    curve = tuple((int(s), float(a), float(b)) for s, a, b in value["curve"])
    loss_and_error = value.get("test")
    test = None if loss_and_error is None else (float(loss_and_error[0]), float(loss_and_error[1]))
    return Measured(**{**value, "curve": curve, "alarms": tuple(value.get("alarms", ())), "test": test})


def front(records: Sequence[TrialRecord]) -> Front:
    """Return the front of a study's complete trials."""
    return front_of({record.number: record.values for record in records if record.values is not None})


@dataclass
class Ledger:
    """The trials of one study in a storage."""

    storage: BaseStorage
    name: str
    _study: int | None = None
    _ids: dict[int, int] = field(default_factory=dict)

    def id_of(self, number: int) -> int:
        """Return the id of a trial in the storage."""
        if number not in self._ids:
            if self._study is None:
                self._study = self.storage.get_study_id_from_name(self.name)
            self._ids[number] = self.storage.get_trial_id_from_study_id_trial_number(self._study, number)
        return self._ids[number]

    def take(self, number: int) -> int | None:
        """Claim a waiting trial for this process and return its storage id; None if another process has claimed it."""
        try:
            is_ours = self.storage.set_trial_state_values(self.id_of(number), TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return None
        return self.id_of(number) if is_ours else None

    def write(self, number: int, attrs: Mapping[str, Any]) -> bool:
        """Set attributes of a trial; return False, with the trial unchanged, if it has ended."""
        try:
            for name, value in attrs.items():
                self.storage.set_trial_user_attr(self.id_of(number), name, value)
        except UpdateFinishedTrialError:
            return False
        return True

    def end(
        self, number: int, state: TrialState, values: Sequence[float] | None, attrs: Mapping[str, Any]
    ) -> bool:
        """Write a trial's attributes and end it; return False, with the trial unchanged, if it had ended before.

        The call can therefore be repeated after an outage that lost the answer. If several processes end a trial, one
        of them succeeds.
        """
        self.write(number, attrs)
        try:
            return bool(self.storage.set_trial_state_values(self.id_of(number), state, values))
        except UpdateFinishedTrialError:
            return False
