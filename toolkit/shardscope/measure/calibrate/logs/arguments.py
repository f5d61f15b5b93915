"""The arguments that Megatron prints, and what each of them means for a row.

`megatron_arguments.json` classifies the arguments of Megatron-LM's parser from v1.0 to August 2026 (core 0.19 and its
main and dev branches) and of both Megatron-DeepSpeeds:

- ``read``: its value is part of the row.
- ``refused_if_set``: changes what is computed, sent or stored in a way that no row can express, unless it is None,
  False, 0 or empty.
- ``refused_unless``: the same with other neutral values.
- ``only_with``: has no effect unless the argument that it is listed under is set.
- ``measured``: chooses a kernel, an overlap or a check, whose effect is part of what calibrations measure.
- ``irrelevant``: changes neither time nor memory. Names with ``*`` are families, for what is not listed by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.logs.text import Line
from shardscope.spec.units import listed

Arguments = Mapping[str, str]
"""Values as they were printed, by name."""

START = re.compile(r"-{3,} arguments -{3,}")
_END = re.compile(r"-{3,} end of arguments -{3,}")
_ARGUMENT = re.compile(
    r"(?:^|\s)(\w+) (\.{3,} |(?<=\w{46} )\.\. |(?<=\w{47} )\. |(?<=\w{48} ) )(.*?)(?=\s+\w+ \.{3,} |$)"
)
"""Megatron pads a name with dots to 48 characters, so that a longer one has none; two ranks may share a line."""
_WIDTH = 48
_UNSET = {"None", "False", "0", "0.0", "", "[]", "{}", "()"}
_ONE = {"1", "1.0"}
_BOOLEANS = {"True": True, "False": False, "None": False}
_RENAMED = {
    "model_parallel_size": "tensor_model_parallel_size",
    "moe_expert_parallel_size": "expert_model_parallel_size",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
}
"""Names of before 2022, and of Megatron-DeepSpeed, with those of today."""
_SAME = ("read", "refused_if_set", "refused_unless", "measured", "unknown")
"""Classes of arguments in which the starts of one job have to agree."""


@cache
def _table() -> Mapping[str, Any]:
    text = files(__package__).joinpath("megatron_arguments.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@cache
def kind_of(name: str) -> str:
    """Return the class of an argument, ``unknown`` for one of no parser that was gone through."""
    exact = next((kind for kind, names in _table().items() if kind != "only_with" and name in names), None)
    if exact is not None:
        return exact
    families = (each for each in _table()["irrelevant"] if "*" in each)
    return "irrelevant" if any(fnmatchcase(name, each) for each in families) else "unknown"


@cache
def _switches() -> Mapping[str, str]:
    return {name: switch for switch, names in _table()["only_with"].items() for name in names}


def is_set(arguments: Arguments, name: str) -> bool:
    """Return whether an argument has another value than None, False, 0 or nothing."""
    return arguments.get(name, "None") not in _UNSET


def flag(arguments: Arguments, name: str, *, default: bool = False) -> bool:
    """Return the value of an argument that is True or False.

    Raises:
        SpecError: It is neither, as where another rank's message has run into the line.
    """
    value = arguments.get(name)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise SpecError(f"{name}={value} is neither True nor False; give the log as it was written")
    return _BOOLEANS[value]


def arguments_of(lines: Sequence[Line], name: str) -> list[Arguments]:
    """Return the arguments of each start of the job, by today's names; none if the log does not print them.

    Raises:
        DataError: Some are missing at either end, or the starts differ in one, so that they are of several runs.
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
                    f"rows={name!r} ends Megatron's arguments without having begun them; give the whole log"
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
    if block.get(key, value) != value and kind_of(key) in _SAME:
        raise DataError(_several(name, key, block[key], value))


def _check_same(one: Arguments, other: Arguments, name: str) -> None:
    for key in sorted(one.keys() | other.keys()):
        if kind_of(key) in _SAME and one.get(key) != other.get(key):
            raise DataError(_several(name, key, one.get(key), other.get(key)))


def _several(name: str, key: str, one: str | None, other: str | None) -> str:
    return f"rows={name!r} is of several runs, with {key}={one} and {key}={other}; give one file per run"


def check_understood(arguments: Arguments, name: str) -> None:
    """Refuse arguments that change time or memory in a way that a row cannot express, by name.

    Raises:
        SpecError: There are such arguments, or some that no known parser has and that are set.
    """
    if (found := _not_understood(arguments)) != []:
        said = listed(f"{key}={arguments[key]}" for key in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise SpecError(
            f"rows={name!r} states {said}{more}, which rows cannot express; give rows of runs without, or remove the "
            "lines of those that change neither time nor memory"
        )


def _not_understood(arguments: Arguments) -> list[str]:
    unless = _table()["refused_unless"]
    return [
        key
        for key in arguments
        if kind_of(key) in {"refused_if_set", "refused_unless", "unknown"}
        and is_set(arguments, key)
        and arguments[key] not in unless.get(key, ())
        and _is_effective(arguments, key)
    ] + [
        key
        for key in unless
        if arguments.get(key) == "False" and "True" in unless[key] and _is_effective(arguments, key)
    ]


def _is_effective(arguments: Arguments, key: str) -> bool:
    switch = _switches().get(key)
    return switch is None or (is_set(arguments, switch) and arguments[switch] not in _ONE)
