"""Options NAME=VALUE for the settings of methods, and of parts of a job whose main setting has its own option.

A part such as `recovery` takes its most important setting as the option's value, ``--recovery 3``, and all others
through ``--recovery-set replica_every=1``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardscope.commands._fields import flag_of
from shardscope.errors import SpecError, quoted
from shardscope.foreign_file import parsed_json
from shardscope.spec import Elastic, Job, Recovery, Shards
from shardscope.spec._base import Spec
from shardscope.spec.data import DATA
from shardscope.spec.elastic import elastic_from
from shardscope.spec.fields import has_unit
from shardscope.spec.recovery import recovery_from


class Part(NamedTuple):
    """A part of a job whose settings have an option.

    Attributes:
        kind: Class of the part.
        read: Function that converts the value of the part's own option; may return None, or the text unchanged.
        example: An example of a setting.
        own: Error texts for fields that are set by the value of the part's own option, not by settings.
        needs: What the user must give besides settings, if settings alone do not define the part.
    """

    kind: type[Spec]
    read: Callable[[Any], Any]
    example: str
    own: Mapping[str, str]
    needs: str = ""


def _shards(value: Any) -> Any:
    return value if not isinstance(value, str) or value in DATA else Shards(path=value)


PARTS: Mapping[str, Part] = {
    "data": Part(
        Shards, _shards, "'cache=20 GB'", {"path": "names the data; use --data {}"},
        "the path of shards, such as --data corpus/",
    ),
    "recovery": Part(
        Recovery, recovery_from, "replica_every=1",
        {"restarts": "is the number of restarts; use --recovery {}"},
    ),
    "elastic": Part(
        Elastic, elastic_from, "batch=scaled",
        dict.fromkeys(("least", "most"), "is an end of the range of ranks; use --elastic, such as --elastic 2:8"),
        "a range of ranks, such as --elastic 2:8",
    ),
}  # fmt: skip
"""The parts, by field of the job."""


def add_settings(parser: argparse.ArgumentParser, name: str, example: str) -> None:
    """Add the option for the settings of a field of the job."""
    parser.add_argument(
        f"{flag_of(name)}-set", action="append", metavar="NAME=VALUE",
        help=f"a setting for {flag_of(name)}, such as {example}; can be repeated",
    )  # fmt: skip


def part_with_settings(name: str, arguments: argparse.Namespace, base: Job | None) -> Spec | None:
    """Return the part of a job with the settings given by the options; None if no settings are given.

    Raises:
        SpecError: A setting is unknown or not valid, or there is nothing to set.
    """
    given, part = getattr(arguments, f"{name}_set") or [], PARTS[name]
    if not given:
        return None
    settings = dict(_setting(name, text, part) for text in given)
    value = getattr(arguments, name)
    if value is None and base is not None:
        value = getattr(base, name)
    start = part.kind() if value is None and not part.needs else part.read(value)
    if not isinstance(start, part.kind):
        told = "is not given" if value is None else f"is {quoted(str(getattr(value, 'name', value)))}"
        raise SpecError(
            f"{flag_of(name)}-set {quoted(given[0])} has no effect, because {flag_of(name)} {told}; give "
            f"{part.needs or f'{flag_of(name)} a value that has settings'}, or leave {flag_of(name)}-set out"
        )
    return start.replace(**settings)


def _setting(field: str, text: str, part: Part) -> tuple[str, Any]:
    """Parse a setting of a part; a number without a unit stays a string, so that fields with a unit reject it."""
    name, value = parse_setting(field, text, part.example)
    if name in part.own:
        raise SpecError(f"{flag_of(field)}-set {quoted(text)} {part.own[name].format(value)}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name in part.kind.model_fields and has_unit(part.kind.model_fields[name]):
        return name, text.partition("=")[2]
    return name, value


def parse_setting(field: str, text: str, example: str) -> tuple[str, Any]:
    """Parse text such as ``ratio=0.01`` into a name and a value; a value that is not valid JSON stays a string.

    Raises:
        SpecError: The text is not NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"{flag_of(field)}-set {text!r} is not NAME=VALUE; write for example {example}")
    try:
        return name, parsed_json(value)
    except ValueError:
        return name, value
