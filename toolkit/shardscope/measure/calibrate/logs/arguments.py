"""The arguments that Megatron prints, and their meanings for a row.

`megatron_arguments.json` classifies the arguments of Megatron-LM's parser from v1.0 to August 2026 (core 0.19 and its
main and dev branches) and of both Megatron-DeepSpeeds:

- ``read``: the argument's value is part of the row. - ``refused_if_set``: changes what is computed, sent or stored in a
way that no row can express, unless the value is None, False, 0 or empty. - ``refused_unless``: like ``refused_if_set``,
but with other neutral values. - ``only_with``: has no effect unless the argument that it is listed under is set. -
``measured``: chooses a kernel, an overlap or a check, whose effect is part of what calibrations measure. -
``refused_of_deepspeed``: the same as ``refused_if_set`` for entries of DeepSpeed's own configuration. - ``irrelevant``:
changes neither time nor memory. Names with ``*`` are families of arguments that are not listed by
  name.

Forks and users add arguments of their own. Those that are set and have one of ``words_of_unknown`` in their names are
refused as well; other unknown arguments, such as names of data sets, are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from shardscope.errors import DataError, SpecError, quoted
from shardscope.measure.calibrate.logs.text import Line
from shardscope.spec.units import listed

Arguments = Mapping[str, str]
"""Values as they were printed, by name."""

START = re.compile(r"-{3,} arguments -{3,}")
_END = re.compile(r"-{3,} end of arguments -{3,}")
_ARGUMENT = re.compile(
    r"(?:^|\s)(\w+) (\.{3,} |(?<=\w{46} )\.\. |(?<=\w{47} )\. |(?<=\w{48} ) )(.*?)(?=\s+\w+ \.{3,} |$)"
)
"""Megatron pads names with dots to 48 characters, so longer names have no dots; two ranks may share a line."""
_WIDTH = 48
_UNSET = {"None", "False", "0", "0.0", "", "[]", "{}", "()"}
_ONE = {"1", "1.0", "[1]"}
_COUNTED = {"layers", "heads", "mtp"}
"""Words in the names of unknown arguments for which a count of one differs from the argument being off."""
_COUNT = re.compile(r"[0-9]{1,15}")
_BOOLEANS = {"True": True, "False": False, "None": False}
_RENAMED = {
    "model_parallel_size": "tensor_model_parallel_size",
    "moe_expert_parallel_size": "expert_model_parallel_size",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
}
"""Current names of arguments, by their names before 2022 or in Megatron-DeepSpeed."""
_KINDS = ("read", "refused_if_set", "refused_unless", "measured", "irrelevant")
_SAME = ("read", "refused_if_set", "refused_unless", "measured", "unknown")
"""Classes of arguments that must be equal in all starts of one job."""
_MAY_DIFFER = ("num_workers", "profile*", "record_*", "timing_log_*", "log_*")
"""Arguments that may differ between starts, because people change them to inspect a restarted job."""


@cache
def table() -> Mapping[str, Any]:
    """Return the classes of arguments by name."""
    text = files(__package__).joinpath("megatron_arguments.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@cache
def kind_of(name: str) -> str:
    """Return the class of an argument; ``unknown`` if no known parser has it but its name suggests that it matters."""
    exact = next((kind for kind in _KINDS if name in table()[kind]), None)
    if exact is not None:
        return exact
    if any(fnmatchcase(name, each) for each in table()["irrelevant"] if "*" in each):
        return "irrelevant"
    return "unknown" if set(name.lower().split("_")) & set(table()["words_of_unknown"]) else "irrelevant"


@cache
def _switches() -> Mapping[str, str]:
    return {name: switch for switch, names in table()["only_with"].items() for name in names}


def is_set(arguments: Arguments, name: str) -> bool:
    """Return whether an argument has a value other than None, False, 0 or an empty value."""
    return arguments.get(name, "None") not in _UNSET


def flag(arguments: Arguments, name: str, *, default: bool = False) -> bool:
    """Return the value of an argument that is True or False.

    Raises:
        SpecError: The value is neither, for example because another rank's message is on the same line.
    """
    value = arguments.get(name)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise SpecError(f"{name}={value} is neither True nor False; give the original, unedited log")
    return _BOOLEANS[value]


def is_count(value: str | None) -> bool:
    """Return whether a value is a whole number of a plausible size."""
    return value is not None and _COUNT.fullmatch(value) is not None


def count(value: str, key: str) -> int:
    """Return a value that is a whole number.

    Raises:
        SpecError: The value is not a whole number, or is implausibly large.
    """
    if not is_count(value):
        raise SpecError(
            f"{key}={quoted(value)} is not a whole number of up to 15 digits; give the original, unedited log"
        )
    return int(value)


def arguments_of(lines: Sequence[Line], name: str) -> list[Arguments]:
    """Return the arguments of each start of the job, by their current names; none if the log does not print them.

    Raises:
        DataError: The list is cut off at either end, or starts differ in an argument, so they belong to several runs.
    """
    found: list[Arguments] = [
        {_RENAMED.get(key, key): value for key, value in block.items() if _RENAMED.get(key) not in block}
        for block in _blocks(lines, name)
    ]
    for block in found[1:]:
        _check_same(found[0], block, name)
    return found


def _blocks(lines: Iterable[Line], name: str) -> Iterator[Arguments]:
    block: dict[str, str] = {}
    depth = 0
    for line in lines:
        if START.search(line.text):
            depth += 1
        elif _END.search(line.text):
            depth -= 1
            if depth < 0:
                raise DataError(
                    f"rows={name!r} has the end of Megatron's arguments but not their beginning; give the whole log"
                )
            if depth == 0:
                yield block
                block = {}
        elif depth:
            for key, dots, value in _ARGUMENT.findall(line.text):
                if kind_of(key) == "unknown" and len(key) + len(dots.strip()) < _WIDTH:
                    continue  # another rank's message that ends in dots, such as "> building the dataset ... done"
                _check_once(block, key, value.strip(), name)
                block[key] = value.strip()
    if depth:
        raise DataError(f"rows={name!r} breaks off in Megatron's arguments; give the whole log")


def _check_once(block: Arguments, key: str, value: str, name: str) -> None:
    if not _is_same(key, block.get(key, value), value):
        raise DataError(_several(name, key, block[key], value))


def _check_same(one: Arguments, other: Arguments, name: str) -> None:
    for key in sorted(one.keys() | other.keys()):
        if not _is_same(key, one.get(key, "None"), other.get(key, "None")):
            raise DataError(_several(name, key, one.get(key), other.get(key)))


def _is_same(key: str, one: str, other: str) -> bool:
    """Return whether two starts agree; an argument that is off counts as equal to a missing one."""
    kind = kind_of(key)
    if one == other or kind not in _SAME or any(fnmatchcase(key, each) for each in _MAY_DIFFER):
        return True
    if kind in {"read", "measured"}:
        return {one, other} <= {"None", "False"}
    unless: Mapping[str, Sequence[str]] = table()["refused_unless"]
    return _is_neutral(key, one, unless) and _is_neutral(key, other, unless)


def _several(name: str, key: str, one: str | None, other: str | None) -> str:
    return f"rows={name!r} differs between starts, with {key}={one} and {key}={other}; give one file per run"


def check_understood(arguments: Arguments, name: str) -> None:
    """Reject arguments that change time or memory in a way that a row cannot express.

    Raises:
        SpecError: The log has such arguments, or unknown ones whose names suggest it; the message names them.
    """
    if (found := _not_understood(arguments)) != []:
        said = listed(f"{key}={arguments[key]}" for key in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise SpecError(
            f"rows={name!r} states {said}{more}, which rows cannot express; give rows of runs without, or a CSV "
            "file of the measured step, with the layout and the model, if they change neither time nor memory"
        )


def _not_understood(arguments: Arguments) -> list[str]:
    unless: Mapping[str, Sequence[str]] = table()["refused_unless"]
    return [
        key
        for key, value in arguments.items()
        if not _is_neutral(key, value, unless) and _is_effective(arguments, key)
    ]


def _is_neutral(key: str, value: str, unless: Mapping[str, Sequence[str]]) -> bool:
    kind = kind_of(key)
    if kind == "refused_unless":
        allowed = unless[key]
        return value in allowed or (value in _UNSET and "True" not in allowed) or value == "None"
    if kind == "unknown":  # a size of 1 is that of parallelism which a fork has and does not use
        return value in _UNSET or (value in _ONE and not _COUNTED & set(key.lower().split("_")))
    return kind != "refused_if_set" or value in _UNSET


def _is_effective(arguments: Arguments, key: str) -> bool:
    switch = _switches().get(key)
    return switch is None or (is_set(arguments, switch) and arguments[switch] not in _ONE)
