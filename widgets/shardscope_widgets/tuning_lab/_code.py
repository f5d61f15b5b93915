"""A job as Python code with the fields that differ from the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.spec import Job, Link, Method, Strategy
from shardscope.spec._base import Spec
from shardscope.spec.job_parts import UserCode, label_of
from shardscope.spec.units import Kind, bit_rate_text, parse, seconds_text

_SHORT = {"Batch": "global_batch"}
"""Parts of a job that can be written as the value of a single field, with the name of that field."""
_UNITS: Mapping[str, tuple[Kind, Callable[[float], str], tuple[str, ...]]] = {
    "bandwidth": ("bytes/s", bit_rate_text, ("Mbit/s", "Gbit/s", "MB/s", "GB/s")),
    "latency_s": ("s", seconds_text, ("ms", "us", "s")),
}
"""Fields of a link: dimension, formatter, and units to try if the formatted text does not parse to the same number."""
_ASKED = {"latency_s": "latency"}
"""Names of arguments that differ from the names of their fields."""


def job_code(job: Job) -> str:
    """Return ``ss.Job(...)`` with one field per line; a user-defined model or data set appears by its name.

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
    if isinstance(value, Strategy) and _is_short(value):
        return _quoted(value.label)
    if isinstance(value, Method):
        return _method(value)
    if isinstance(value, Spec):
        return _part(value)
    return _quoted(value) if isinstance(value, str) else repr(value)


def _is_short(strategy: Strategy) -> bool:
    """Return whether the strategy's label alone recreates it."""
    try:
        return Strategy.resolve(strategy.label) == strategy and strategy.user_code is None
    except SpecError:
        return False


def _method(value: Method) -> str:
    """Return the code of a method: its name, or, for a user-defined method, a call of its class, whose code is not
    included.
    """
    given = [f"{field}={_code(each)}" for field, each in value.changed.items()]
    if value.user_code is not None and value.is_here:
        return f"{type(value).__name__}({', '.join(given)})"
    base = value.base_class().__name__
    return f"ss.{base}({', '.join([_quoted(value.name), *given])})" if given else _quoted(value.name)


def _part(value: Spec) -> str:
    name, given = type(value).__name__, _given(value)
    if [*given] == [_SHORT.get(name)]:
        return _code(next(iter(given.values())))
    home = "ss" if hasattr(ss, name) else "ss.spec"
    fields = [f"{_ASKED.get(field, field)}={_field(value, field, each)}" for field, each in given.items()]
    return f"{home}.{name}({', '.join(fields)})"


def _field(owner: Spec, name: str, value: Any) -> str:
    """Return the code of a field; fields of a link have units if the text parses to exactly the same number."""
    if not isinstance(owner, Link) or name not in _UNITS:
        return _code(value)
    kind, write, units = _UNITS[name]
    texts = [write(value), *(f"{value / parse(f'1 {unit}', kind):.4g} {unit}" for unit in units)]
    return next((_quoted(text) for text in texts if value and parse(text, kind) == value), _code(value))


def _quoted(text: str) -> str:
    return '"' + repr(text)[1:-1].replace('"', '\\"') + '"'
