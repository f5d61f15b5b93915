"""Records of a study's trials, readable from any machine at any time, and a writer that addresses trials by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from shardscope.errors import ShardscopeError, StudyError, quoted
from shardscope.spec.space import PowersOfTwo, Space, Value
from shardscope.tuning.front import Front, front_of
from shardscope.tuning.measured import TrialMetrics

# Names of the trial attributes in a study.
ORIGIN, DRIVER, RUN, REASON, MEASURED, RETRY_OF, NOT_COUNTED, PINNED, PAUSED, SAMPLER, SEED = (
    "origin", "driver", "run", "reason", "measured", "retry_of", "not_counted", "pinned", "paused", "sampler", "seed",
)  # fmt: skip
DRAWN = "drawn"
"""Attribute of trials queued by a driver. Trials queued by the user lack it, and may repeat settings."""
AGAIN = "again"
"""Origin of trials that the user asked to rerun; they run before other queued trials."""
_LOG2 = "log2({})"


def study_name(name: str, space: Space) -> str:
    """Return the name under which the study stores a parameter; for powers of two, it stores the exponent."""
    return _LOG2.format(name) if isinstance(space.parameters[name], PowersOfTwo) else name


def to_study(params: Mapping[str, Value], space: Space) -> dict[str, Any]:
    """Convert settings to the names and values that the Optuna study stores: for a power of two, its exponent."""
    return {
        study_name(name, space): int(str(value)).bit_length() - 1
        if isinstance(space.parameters[name], PowersOfTwo)
        else value
        for name, value in params.items()
    }


def from_study(params: Mapping[str, Any], space: Space) -> dict[str, Value]:
    """Convert settings that the Optuna study stores to the names and values of the space."""
    names = {study_name(name, space): name for name in space.parameters}
    return {
        names[held]: 2 ** int(value) if isinstance(space.parameters[names[held]], PowersOfTwo) else value
        for held, value in params.items()
        if held in names
    }


@dataclass(frozen=True)
class TrialRecord:
    """State, settings and results of one trial.

    Attributes:
        state: ``waiting``, ``running``, ``paused`` (at a rung, with its checkpoint), ``complete``, ``pruned``,
            ``impossible`` (rejected before launch), ``failed``, ``skipped`` (another trial has its settings or its
            slot), or ``unused`` (still queued when the study reached its number of trials; it runs first if more
            trials are requested).
        params: Settings, keyed by the names of the space.
        values: Values of the objectives by name; None unless complete.
        reason: Why the trial was pruned, impossible, failed or skipped, in one sentence.
        origin: Source of the settings: ``drawn`` (sampled), ``default`` (the job's own), ``baseline`` or ``prior``
            (seeds, see `priors`), or ``again`` (a rerun requested by the user).
        run: Path of its run directory on the machine that ran it; the newest run's if it was trained in
            pieces.
        host: Machine whose driver started the trial.
        measured: Metrics of the run.
        retry_of: Number of the trial that this one retries.
        counted: Whether the trial counts towards the study's number of trials.
        pinned: Whether a user has pinned the trial.
        sampler: Name of the sampler that chose the settings not fixed in advance; None if all were fixed.
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
    measured: TrialMetrics | None
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
IMPOSSIBLE, UNUSED, SKIPPED = "impossible", "unused", "skipped"
OVER_BUDGET = "surplus"
"""Mark of trials that were not run or were stopped, because another trial has their settings or their slot."""
NOT_BEGUN = ("waiting", UNUSED)
_ENDED = ("complete", "pruned", "failed")


def not_counted(trial: FrozenTrial) -> str | None:
    """Return the mark that says why a trial does not count towards the study's number of trials; None if it counts.

    The mark is written before the trial is ended, and another driver may end the trial in between. Therefore a mark
    that disagrees with the final state is ignored.
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
        number=trial.number, state={IMPOSSIBLE: IMPOSSIBLE, OVER_BUDGET: SKIPPED}.get(mark or "", state),
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
    """Return whether a trial that Optuna lists as running is paused, because its newest run has completed its piece."""
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

    Once `wanted` trials have ended, waiting trials are ``unused``, except retries and reruns requested by the user.
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
    reason = "the study reached its number of trials before this one started"
    return replace(record, state=UNUSED, counted=False, reason=reason)


def measured_to(measured: TrialMetrics) -> dict[str, Any]:
    """Return metrics as a dictionary, to be stored in an attribute of a trial."""
    return asdict(measured)


def measured_from(value: Mapping[str, Any] | None) -> TrialMetrics | None:
    """Return the metrics that `measured_to` stored."""
    if value is None:
        return None
    curve = tuple((int(s), float(a), float(b)) for s, a, b in value["curve"])
    loss_and_error = value.get("test")
    test = None if loss_and_error is None else (float(loss_and_error[0]), float(loss_and_error[1]))
    return TrialMetrics(**{**value, "curve": curve, "alarms": tuple(value.get("alarms", ())), "test": test})


def front(records: Sequence[TrialRecord]) -> Front:
    """Return the Pareto front of a study's complete trials."""
    return front_of({record.number: record.values for record in records if record.values is not None})


@dataclass
class TrialWriter:
    """Writes the trials of one study to its storage, by trial number.

    Args:
        storage: Optuna storage of the study.
        name: Name of the study.
    """

    storage: BaseStorage
    name: str
    _study: int | None = None
    _ids: dict[int, int] = field(default_factory=dict)

    def id_of(self, number: int) -> int:
        """Return the storage's id for a trial number."""
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
        """Write attributes of a trial and end the trial; return False, and change nothing, if it had already ended.

        The call can safely be repeated after an outage in which its reply was lost. If several processes end a trial,
        only one of them succeeds.
        """
        self.write(number, attrs)
        try:
            return bool(self.storage.set_trial_state_values(self.id_of(number), state, values))
        except UpdateFinishedTrialError:
            return False


def check_trials(trials: Iterable[FrozenTrial], space: Space, *, study: str) -> None:
    """Reject a study that contains a trial which no driver of this toolkit could have written.

    Args:
        trials: All trials in the storage.
        space: The study's space.
        study: Name of the study, for the message.

    Raises:
        StudyError: Another program wrote a trial; the message names the trial, the attribute and its value.
    """
    exponents = {
        study_name(name, space): range(parameter.exponents[0], parameter.exponents[1] + 1)
        for name, parameter in space.parameters.items()
        if isinstance(parameter, PowersOfTwo)
    }
    for trial in trials:
        fixed = trial.system_attrs.get("fixed_params", {})
        settings = {**(fixed if isinstance(fixed, Mapping) else {}), **trial.params}
        wrong = [] if isinstance(fixed, Mapping) else [("fixed_params", fixed)]
        wrong += [
            (name, value)
            for name, value in settings.items()
            if name in exponents and not (_is_whole(value) and int(value) in exponents[name])
        ]
        wrong += [
            (name, trial.user_attrs[name])
            for name, is_ours in _FORMS.items()
            if name in trial.user_attrs and not is_ours(trial.user_attrs[name], trial)
        ]
        if wrong:
            name, value = wrong[0]
            raise StudyError(
                f"study {study!r}: trial {trial.number} has {name}={quoted(value)}, which Shardscope does not write; "
                "another program has written to this study; create a study with another name"
            )


def _is_text(value: Any, _: FrozenTrial) -> bool:
    return value is None or (isinstance(value, str) and "\x00" not in value)


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_driver(value: Any, _: FrozenTrial) -> bool:
    return value is None or (isinstance(value, Mapping) and isinstance(value.get("host"), str | None))


def _is_earlier(value: Any, trial: FrozenTrial) -> bool:
    return value is None or (type(value) is int and 0 <= value < trial.number)


def _is_paused(value: Any, _: FrozenTrial) -> bool:
    if value is None:
        return True
    runs = value.get("runs") if isinstance(value, Mapping) else None
    return isinstance(runs, list) and bool(runs) and all(isinstance(run, str) for run in runs)


def _is_measured(value: Any, _: FrozenTrial) -> bool:
    try:
        measured_from(value)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, ShardscopeError):
        return False
    return True


_FORMS: Mapping[str, Callable[[Any, FrozenTrial], bool]] = {
    **dict.fromkeys((ORIGIN, RUN, REASON, SAMPLER, NOT_COUNTED), _is_text),
    SEED: lambda value, _: value is None or type(value) is int,
    DRIVER: _is_driver,
    RETRY_OF: _is_earlier,
    PAUSED: _is_paused,
    MEASURED: _is_measured,
}
