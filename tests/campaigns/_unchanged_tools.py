"""Pinning, plain forms and differences of records, for `unchanged.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardscope as ss

TOLERANCE = 1e-12
_AROUND = 30
"""Characters shown before and after the place where two texts differ."""


def pin_this_machine(cache: Path) -> None:
    """Save the calibration that ships as if it had been measured here, so that no speed is measured."""
    shipped = ss.HostCalibration.shipped()
    here = shipped.replace(machine=type(shipped.machine).here())
    (cache / "calibration-machine.json").write_text(here.to_json(), encoding="utf-8")


def plain(value: Any) -> Any:
    """Return a value in a form that JSON keeps: arrays as lists, named tuples and specs as mappings."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [plain(each) for each in value]
    return str(value)


def attempt(make: Callable[[], Any]) -> Any:
    """Return a result in plain form, or the sentence with which it is refused."""
    try:
        return plain(make())
    except ss.ShardscopeError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield each difference of two plain values, with the way to it; what is new in a mapping is one, too."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in after:
                yield f"{path}: {key} is no more"
            elif key not in before:
                yield f"{path}: {key} is new"
            else:
                yield from differences(before[key], after[key], f"{path} > {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif isinstance(before, str) and isinstance(after, str):
        if before != after:
            yield f"{path}: {_where(before, after)}"
    elif not _equal(before, after):
        yield f"{path}: was {_short(before)}, is {_short(after)}"


def _equal(before: Any, after: Any) -> bool:
    numbers = (int, float)
    if type(before) in numbers and type(after) in numbers:
        both_nan = math.isnan(before) and math.isnan(after)
        return both_nan or math.isclose(before, after, rel_tol=TOLERANCE)
    return bool(before == after)


def _where(before: str, after: str) -> str:
    """Return the surroundings of the first place where two texts differ."""
    pairs = enumerate(zip(before, after, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(0, at - _AROUND)
    line = before.count("\n", 0, at) + 1
    was, now = (text[start : at + _AROUND] for text in (before, after))
    return f"line {line}: was ...{was!r}..., is ...{now!r}..."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 4 * _AROUND else text[: 4 * _AROUND] + "..."
