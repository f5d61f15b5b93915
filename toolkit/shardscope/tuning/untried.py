"""The untried settings of a space; a study of a finite space ends when no untried settings are left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from shardscope.spec.space import Between, Choices, PowersOfTwo, Value
from shardscope.spec.units import plural
from shardscope.tuning.apply import branches_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.records import DRAWN, ORIGIN, OVER_BUDGET, RETRY_OF, not_counted, to_study

_MOST = 10_000
"""Number of settings above which a space counts as infinite, because no study tries so many."""
_MOST_REPEATS = 20
"""Number of consecutive choices already tried, and therefore not run, after which a study of an infinite space ends."""
Settings = Mapping[str, Any]
"""Settings with the names and values that the study stores."""


def all_settings(definition: Definition) -> list[Settings] | None:
    """Return all combinations of settings that a study searches; None if there are more than `_MOST`."""
    space, defaults = definition.searched, branches_of(definition.job)
    if any(_values(parameter) is None for parameter in space.parameters.values()):
        return None

    def settings(chosen: dict[str, Value]) -> Iterator[Settings]:
        for name in space.active(chosen, defaults):
            if name not in chosen:
                for value in _values(space.parameters[name]) or ():
                    yield from settings({**chosen, name: value})
                return
        yield to_study(chosen, space)

    found = list(islice(settings({}), _MOST + 1))
    return None if len(found) > _MOST else found


def untried(settings: Sequence[Settings], trials: Sequence[FrozenTrial]) -> list[Settings]:
    """Return the settings that no started trial has."""
    tried = {_key(trial.params) for trial in trials if _is_tried(trial)}
    return [each for each in settings if _key(each) not in tried]


def settings_left(
    settings: Sequence[Settings] | None, trials: Sequence[FrozenTrial], repeats: int
) -> list[Settings] | None:
    """Return the untried settings of a finite space; None for an infinite space, or if a queued trial comes first.

    An infinite space counts as used up once the sampler has repeated itself `repeats` times in a row.
    """
    if any(trial.state == TrialState.WAITING for trial in trials):
        return None
    if settings is None:
        return [] if repeats >= _MOST_REPEATS else None
    return untried(settings, trials)


def used_up_text(settings: Sequence[Settings] | None, ended: int) -> str:
    """Return the sentence for a study that ended after `ended` trials because nothing new was left to try."""
    after = f"so the study ends after {plural(ended, 'trial')}."
    if settings is None:
        return f"The sampler has chosen settings that had been tried {_MOST_REPEATS} times in a row, {after}"
    return f"All {plural(len(settings), 'setting')} of the space have been tried, {after}"


def tried_before(number: int, trials: Sequence[FrozenTrial]) -> int | None:
    """Return the number of an earlier trial with the settings of trial `number`; None if there is none.

    Trials that repeat an earlier one on purpose (a lost trial, or a rerun requested by the user) do not count.
    """
    own = trials[number]
    is_queued_by_user = "fixed_params" in own.system_attrs and DRAWN not in own.user_attrs
    if is_queued_by_user or ORIGIN in own.user_attrs or RETRY_OF in own.user_attrs:
        return None
    same = (trial for trial in trials[:number] if _is_tried(trial) and _key(trial.params) == _key(own.params))
    return next((trial.number for trial in same), None)


def _is_tried(trial: FrozenTrial) -> bool:
    return trial.state != TrialState.WAITING and not_counted(trial) != OVER_BUDGET


def _values(parameter: Choices | Between | PowersOfTwo) -> Sequence[Value] | None:
    """Return all values of a parameter; None if there are too many."""
    if isinstance(parameter, Choices):
        return parameter.values
    if isinstance(parameter, PowersOfTwo):
        low, high = parameter.exponents
        return [2**exponent for exponent in range(low, high + 1)]
    if parameter.low == parameter.high:
        return [parameter.low]
    is_listed = parameter.is_whole and parameter.high - parameter.low < _MOST
    return range(int(parameter.low), int(parameter.high) + 1) if is_listed else None


def _key(settings: Settings) -> frozenset[tuple[str, Any]]:
    return frozenset(settings.items())
