"""Drawing a trial's settings from the study's sampler, or from what was put into its queue, by whomever; and saying
which sampler drew them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna

from shardscope.errors import SpecError, StudyError
from shardscope.spec.space import Between, Choices, PowersOfTwo, Space, Value
from shardscope.tuning.apply import branches_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.records import SAMPLER, study_name
from shardscope.tuning.samplers import drawn_by

POSSIBLE = "possible"
"""The constraint of every trial; samplers learn from it."""


def suggest(trial: optuna.Trial, definition: Definition) -> dict[str, Value]:
    """The settings of a trial; what was drawn before an answer was lost is not drawn again.

    Raises:
        SpecError: Somebody has queued it with a value that is not in the space.
        StudyError: The study holds a trial, added by something else, whose parameters are of another kind.
    """
    space = definition.space
    chosen: dict[str, Value] = {}
    queued = _queued(trial)
    _check_queued(queued, space)
    for name in space.active(chosen, branches_of(definition.job)):
        parameter, held = space.parameters[name], study_name(name, space)
        try:
            chosen[name] = _suggested(trial, held, parameter)
        except ValueError as error:  # all that Optuna says of a distribution that does not fit an earlier one
            raise StudyError(
                f"study {trial.study.study_name!r} holds a trial that something else has added, whose {held!r} is of "
                f"another kind ({error}); give yours another name"
            ) from error
    if SAMPLER not in trial.user_attrs and not set(trial.params) <= set(queued):
        trial.set_user_attr(SAMPLER, drawn_by(trial.study.sampler, trial.number))
    return chosen


def constrain(trial: optuna.Trial, value: float) -> None:
    """Say whether a trial is possible, unless that was said before an answer was lost."""
    if POSSIBLE not in trial.constraints:
        trial.set_constraint(POSSIBLE, value)


def _suggested(trial: optuna.Trial, held: str, parameter: Choices | Between | PowersOfTwo) -> Value:
    if isinstance(parameter, Choices):
        return trial.suggest_categorical(held, parameter.values)
    if isinstance(parameter, PowersOfTwo):
        return int(2 ** trial.suggest_int(held, *parameter.exponents))
    if parameter.is_whole:
        return trial.suggest_int(held, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(held, float(parameter.low), float(parameter.high), log=parameter.log)


def _queued(trial: optuna.Trial) -> Mapping[str, Any]:
    """What was put into the queue with it."""
    attrs = trial.study.get_trials(deepcopy=False)[trial.number].system_attrs
    fixed: Mapping[str, Any] = attrs.get("fixed_params", {})
    return fixed


def _check_queued(queued: Mapping[str, Any], space: Space) -> None:
    known = {study_name(name, space): parameter for name, parameter in space.parameters.items()}
    for held, value in queued.items():
        if held not in known or not _holds(known[held], value):
            raise SpecError(f"it was queued with {held}={value!r}, which the space does not hold")


def _holds(parameter: Choices | Between | PowersOfTwo, value: Any) -> bool:
    """Whether a parameter can have a value, as the study holds it."""
    if isinstance(parameter, Choices):
        return value in parameter.values
    low, high = parameter.exponents if isinstance(parameter, PowersOfTwo) else (parameter.low, parameter.high)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    needs_whole = isinstance(parameter, PowersOfTwo) or parameter.is_whole
    return is_number and low <= value <= high and not (needs_whole and value % 1)
