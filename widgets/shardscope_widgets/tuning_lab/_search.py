"""Settings that can be searched, as rows to switch on and narrow, and the resulting search space. No widgets here.

Each row offers discrete values, of which a range picks two and choices pick any number. The settings of the study's
default space are switched on initially; all other settings that suit the job are offered but switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

from shardscope.errors import SpecError
from shardscope.spec import Compression, Job, LRSchedule, registry
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.space import LR_RULES, Between, Choices, PowersOfTwo, Space, Value, parse_name
from shardscope.spec.strategy import strategies
from shardscope.tuning.apply import branches_of
from shardscope.tuning.priors import default_space
from shardscope_widgets.words import three_digits

LABELS = {
    "optimizer": "Optimizer", "batch": "Batch", "lr_rule": "LR scaling rule", "warmup": "Warm-up fraction",
    "compression": "Compression", "strategy": "Strategy", "lr_schedule": "LR schedule", "precision": "Precision",
    "recompute": "Recompute", "clip_norm": "Clip at norm", "world_size": "Ranks", "seed": "Seed",
}  # fmt: skip
SETTINGS = {"lr": "rate", "trust_coefficient": "trust", "weight_decay": "decay"}
_STRENGTHS = {"ratio": (0.001, 0.1), "rank": (1, 8)}
_LARGEST_BATCH = 1 << 12

Parameter = Choices | Between | PowersOfTwo
State = dict[str, dict[str, Any]]


class SpaceRow(NamedTuple):
    """One setting that can be searched."""

    name: str
    label: str
    kind: str
    """Type of the row: ``choices``, ``range``, or ``powers`` for a range of powers of two."""
    options: tuple[Value, ...]
    log: bool
    is_on: bool
    picked: tuple[int, ...]
    """Indices of the picked `options`: any number for choices, both ends for a range."""


def rows_of(job: Job, space: Space | None = None) -> list[SpaceRow]:
    """Return one row for each setting that can be searched for a job.

    Args:
        job: The job.
        space: Search space whose settings are switched on; None uses the default space of a study of `job`.
    """
    given = space if space is not None else default_space(job)
    offered = dict(_offers(job))
    names = sorted({**given.parameters, **offered}, key=_order)
    rows = []
    for name in names:
        own = given.parameters.get(name)
        more = offered.get(name)
        parameter = own if own is not None else more
        assert parameter is not None
        rows.append(_row(name, parameter, more, is_on=own is not None))
    return rows


def _order(name: str) -> tuple[int, str, bool, str]:
    parts = parse_name(name)
    known = list(LABELS)
    return (
        known.index(parts.owner) if parts.owner in known else len(known),
        "",
        parts.setting is not None,
        name,
    )


def _offers(job: Job) -> Iterator[tuple[str, Parameter]]:
    """Yield (name, parameter) for every setting that the lab offers for this job."""
    optimizers = registry.names(Optimizer)
    yield "optimizer", Choices(values=optimizers)
    for name in optimizers:
        usual = Optimizer(name=name).lr
        yield f"optimizer[{name}].lr", Between(low=usual / 10, high=usual * 10, log=True)
    for name in registry.having(Optimizer, "trust_coefficient"):
        yield f"optimizer[{name}].trust_coefficient", Between(low=1e-4, high=1e-2, log=True)
    yield "optimizer.weight_decay", Between(low=1e-4, high=1e-1, log=True)
    size = 2 ** floor(max(1, job.batch.global_batch)).bit_length() // 2
    yield "batch", PowersOfTwo(max(job.world_size, size // 4), min(_LARGEST_BATCH, size * 4))
    yield "lr_rule", Choices(values=LR_RULES)
    yield "warmup", Between(low=0.0, high=0.3)
    yield "lr_schedule", Choices(values=registry.names(LRSchedule))
    yield "compression", Choices(values=registry.names(Compression))
    for setting, (low, high) in _STRENGTHS.items():
        for method in registry.having(Compression, setting):
            yield f"compression[{method}].{setting}", Between(low=low, high=high, log=True)
    yield "strategy", Choices(values=tuple(strategies()))


def _row(name: str, parameter: Parameter, offered: Parameter | None, *, is_on: bool) -> SpaceRow:
    label = _label(name)
    if isinstance(parameter, Choices):
        more = offered.values if isinstance(offered, Choices) else ()
        options = tuple(dict.fromkeys([*more, *parameter.values]))
        picked = tuple(options.index(value) for value in parameter.values) if is_on else ()
        return SpaceRow(name, label, "choices", options, False, is_on, picked)
    ends = (parameter.low, parameter.high)
    steps = _powers(ends) if isinstance(parameter, PowersOfTwo) else _steps(parameter)
    if name.endswith(".ratio"):
        steps = tuple(step for step in steps if step <= 1)
    log = isinstance(parameter, Between) and parameter.log
    kind = "powers" if isinstance(parameter, PowersOfTwo) else "range"
    return SpaceRow(name, label, kind, steps, log, is_on, (steps.index(ends[0]), steps.index(ends[1])))


def _label(name: str) -> str:
    parts = parse_name(name)
    if parts.setting is None:
        return LABELS.get(parts.owner, parts.owner)
    setting = SETTINGS.get(parts.setting, parts.setting.replace("_", " "))
    return f"{parts.branch} {setting}" if parts.branch else f"{parts.owner} {setting}"


def _powers(ends: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(2**k for k in range(max(_LARGEST_BATCH, int(ends[1])).bit_length()))


def _steps(parameter: Between) -> tuple[float | int, ...]:
    """Return round numbers in and around an interval, and its exact endpoints."""
    low, high = parameter.low, parameter.high
    found: list[float | int] = [low, high]
    if parameter.is_whole:
        found += [2**k for k in range(11)] if parameter.log else range(int(low), int(high) + 1)[:64]
    elif parameter.log:
        decades = range(floor(log10(low)) - 2, floor(log10(high)) + 3)
        found += [float(f"{digit}e{decade}") for decade in decades for digit in (1, 2, 5)]
    else:
        found += [round(low + (high - low) * part / 10, 6) for part in range(11)]
        found += [round(0.1 * part, 1) for part in range(11)] if 0 <= low <= high <= 1 else []
    return tuple(sorted(set(found)))


def first_state(rows: Sequence[SpaceRow]) -> State:
    """Return the initial state: whether each row is on, and which options are picked."""
    return {row.name: {"on": row.is_on, "picked": list(row.picked)} for row in rows}


def hidden(rows: Sequence[SpaceRow], state: State, job: Job) -> list[str]:
    """Return the names of rows without effect, because their settings belong to a choice that is not picked."""
    by_name = {row.name: row for row in rows}
    found = []
    for row in rows:
        parts = parse_name(row.name)
        if parts.setting is None or parts.branch is None:
            continue
        owner = by_name[parts.owner]
        picked = {str(owner.options[place]) for place in state[parts.owner]["picked"]}
        chosen = picked if state[parts.owner]["on"] else {branches_of(job)[parts.owner]}
        if parts.branch not in chosen:
            found.append(row.name)
    return found


def space_of(rows: Sequence[SpaceRow], state: State, job: Job) -> Space:
    """Return the search space given by the rows that are switched on.

    Raises:
        SpecError: No row is switched on, or a row has no value or an empty range.
    """
    away = set(hidden(rows, state, job))
    parameters = {
        row.name: _parameter(row, state[row.name]["picked"])
        for row in rows
        if state[row.name]["on"] and row.name not in away
    }
    if not parameters:
        raise SpecError("no setting is searched; switch on at least one")
    return Space(parameters=parameters)


def _parameter(row: SpaceRow, picked: Sequence[int]) -> Parameter:
    values: list[Any] = [row.options[place] for place in picked]
    if row.kind == "choices":
        if not values:
            raise SpecError(
                f"{row.label}: nothing is picked; pick at least one option, or switch the setting off"
            )
        return Choices(values=tuple(values))
    low, high = values
    if low >= high and row.kind == "range":
        raise SpecError(
            f"{row.label}: {text_of(low)} to {text_of(high)} is not a range; choose an upper end above the lower end"
        )
    if row.kind == "powers":
        return PowersOfTwo(low, high)
    return Between(low=low, high=high, log=row.log)


def text_of(value: Value) -> str:
    """Return an option as text."""
    if isinstance(value, float):
        return three_digits(value) if value >= 1e-3 or value == 0 else f"{value:g}"
    return "none" if value is None else str(value)


def as_shown(rows: Sequence[SpaceRow]) -> list[Mapping[str, Any]]:
    """Return the rows as JSON-compatible values for the widget."""
    return [
        {
            "name": row.name, "label": row.label, "options": [text_of(value) for value in row.options],
            "kind": "choices" if row.kind == "choices" else "range", "inner": parse_name(row.name).setting is not None,
        }
        for row in rows
    ]  # fmt: skip
