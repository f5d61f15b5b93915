"""Options NAME=VALUE for the settings of methods, and of parts of a job that have a short form of their own.

A part such as `recovery` takes its most important setting as the option's value, ``--recovery 3``, and all others
through ``--recovery-set replica_every=1``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardscope.commands._fields import flag_of
from shardscope.errors import SpecError, quoted
from shardscope.spec import Elastic, Job, Recovery, Shards
from shardscope.spec._base import Spec
from shardscope.spec.data import DATA
from shardscope.spec.elastic import elastic_from
from shardscope.spec.recovery import recovery_from


class Part(NamedTuple):
    """A part of a job whose settings have an option.

    Attributes:
        kind: Its class.
        read: Function that converts the value of its own option; it may return None or an unchanged text.
        example: An example of a setting.
        needs: What to give besides settings, if they do not make a part by themselves.
    """

    kind: type[Spec]
    read: Callable[[Any], Any]
    example: str
    needs: str = ""


def _shards(value: Any) -> Any:
    return value if not isinstance(value, str) or value in DATA else Shards(path=value)


PARTS: Mapping[str, Part] = {
    "data": Part(Shards, _shards, "'cache=20 GB'", "the path of shards, such as --data corpus/"),
    "recovery": Part(Recovery, recovery_from, "replica_every=1"),
    "elastic": Part(Elastic, elastic_from, "batch=scaled", "a range of ranks, such as --elastic 2:8"),
}
"""The parts, by field of the job."""


def add_settings(parser: argparse.ArgumentParser, name: str, example: str) -> None:
    """Add the option for the settings of a field of the job."""
    parser.add_argument(
        f"{flag_of(name)}-set", action="append", metavar="NAME=VALUE",
        help=f"a setting for {flag_of(name)}, such as {example}; can be repeated",
    )  # fmt: skip


def part_with_settings(name: str, arguments: argparse.Namespace, base: Job | None) -> Spec | None:
    """Return the part of a job with the settings that the options give; None if they give none.

    Raises:
        SpecError: A setting is unknown or not valid, or there is nothing to set.
    """
    given, part = getattr(arguments, f"{name}_set") or [], PARTS[name]
    if not given:
        return None
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
    return start.replace(**dict(parse_setting(name, text, part.example) for text in given))


def parse_setting(field: str, text: str, example: str) -> tuple[str, Any]:
    """Parse text such as ``ratio=0.01`` into a name and a value; a value that is not valid JSON stays a string.

    Raises:
        SpecError: The text is not NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SpecError(f"{flag_of(field)}-set {text!r} is not NAME=VALUE; write for example {example}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
