"""Checks of studies in storages that other programs can write to: trials are validated before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optuna.trial import FrozenTrial

from shardscope.errors import ShardscopeError, StudyError, quoted
from shardscope.spec.space import PowersOfTwo, Space
from shardscope.tuning.records import (
    DRIVER,
    MEASURED,
    NOT_COUNTED,
    ORIGIN,
    PAUSED,
    REASON,
    RETRY_OF,
    RUN,
    SAMPLER,
    SEED,
    measured_from,
    study_name,
)


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
