"""Published specifications as data: devices, links, nodes, prices and models, each with its source.

One JSON file per table maps names to entries. Quantities are strings with units (`shardscope.spec.units`). ``recalled``
lists the fields of an entry whose values could be confirmed neither in its source nor on a page that reproduces the
source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, cast

from shardscope.errors import SpecError, quoted, unknown_name

Table = Literal["devices", "links", "nodes", "prices", "models"]


@cache
def table(name: Table) -> Mapping[str, Mapping[str, Any]]:
    """Return all entries of a table, by name."""
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text))


@cache
def _names(name: Table) -> Mapping[str, str]:
    """Map every spelling of an entry, normalised by `_folded`, to the entry's name."""
    found: dict[str, str] = {}
    for entry, fields in table(name).items():
        for spelling in (entry, *fields.get("aliases", ())):
            assert _folded(spelling) not in found, f"{spelling} is a spelling of two entries of {name}"
            found[_folded(spelling)] = entry
    return found


def _folded(name: str) -> str:
    """Return a name in lower case without spaces, underscores and hyphens: ``A100 80GB`` becomes ``a10080gb``."""
    return re.sub(r"[\s_-]+", "", name).lower()


def has(name: Table, entry: str) -> bool:
    """Return whether a table has an entry with this name, in any spelling, or with this alias."""
    return _folded(entry) in _names(name)


def unknown(field: str, entry: object, names: Iterable[str]) -> SpecError:
    """Return the error for an unknown name of an entry.

    The message lists the entries whose names start with the given name. If there are none, it suggests the entry with
    the closest name and lists all entries.
    """
    known = list(names)
    begun = [name for name in known if isinstance(entry, str) and _folded(name).startswith(_folded(entry))]
    if entry and begun:
        return SpecError(
            f"{field}={quoted(entry)} is not the full name of an entry; use {' or '.join(begun)}"
        )
    return unknown_name(field, entry, known)


def lookup(name: Table, entry: str, *, field: str) -> tuple[str, dict[str, Any]]:
    """Return the canonical name of an entry, given by any spelling or alias, and its fields without aliases.

    Raises:
        SpecError: There is no entry with this name.
    """
    proper = _names(name).get(_folded(entry)) if isinstance(entry, str) else None
    if proper is None:
        raise unknown(field, entry, table(name))
    return proper, {key: value for key, value in table(name)[proper].items() if key != "aliases"}
