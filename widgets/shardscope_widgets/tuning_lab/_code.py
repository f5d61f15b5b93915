"""A job as the Python that makes it: what differs from the defaults, and nothing else."""

from __future__ import annotations

from typing import Any

import shardscope as ss
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.strategy import StrategySpec, parse_strategy
from shardscope.spec.user_code import UserCode, label_of

_SHORT = {"Optimizer": "name", "Compression": "name", "Schedule": "name", "Batch": "global_size"}
"""Parts that a job also takes by this field alone."""


def job_code(job: Job) -> str:
    """``ss.Job(...)``, one field a line; a model or data of the user's own stands by its name.

    Example:
        >>> print(job_code(Job(model="mlp", data="digits", steps=5)))
        ss.Job(
            model="mlp",
            data="digits",
            steps=5,
        )
    """
    given = _given(job)
    given.pop("name", None)
    lines = "".join(f"    {name}={_code(value)},\n" for name, value in given.items())
    return f"ss.Job(\n{lines})"


def _given(spec: Spec) -> dict[str, Any]:
    fields = type(spec).model_fields
    return {
        name: getattr(spec, name)
        for name, info in fields.items()
        if info.is_required() or getattr(spec, name) != info.get_default(call_default_factory=True)
    }


def _code(value: Any) -> str:
    if isinstance(value, UserCode):
        return label_of(value)
    if isinstance(value, StrategySpec) and parse_strategy(value.label) == value:
        return _quoted(value.label)
    if isinstance(value, Spec):
        return _part(value)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _part(value: Spec) -> str:
    name, given = type(value).__name__, _given(value)
    given = {field: each for field, each in given.items() if field != "kind"}
    if [*given] == [_SHORT.get(name)]:
        return _code(next(iter(given.values())))
    home = "ss" if hasattr(ss, name) else "ss.spec"
    return f"{home}.{name}({', '.join(f'{field}={_code(each)}' for field, each in given.items())})"


def _quoted(text: str) -> str:
    return '"' + repr(text)[1:-1].replace('"', '\\"') + '"'
