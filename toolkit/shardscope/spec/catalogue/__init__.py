"""Published figures as data: devices, links, nodes, prices, models, each with its source.

One JSON file a table, from name to entry. Quantities are texts with their units (`shardscope.spec.units`).
``recalled`` lists the figures of an entry that were confirmed neither in the source it names nor on a page that
reproduces it.
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
    """A whole table, from name to entry."""
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text))


@cache
def _names(name: Table) -> Mapping[str, str]:
    """Every spelling of every entry, folded, to its name."""
    found: dict[str, str] = {}
    for entry, fields in table(name).items():
        for spelling in (entry, *fields.get("aliases", ())):
            assert _folded(spelling) not in found, f"{spelling} stands for two of {name}"
            found[_folded(spelling)] = entry
    return found


def _folded(name: str) -> str:
    """Without case, spaces, underscores and hyphens: ``A100 80GB`` is ``a100-80gb``."""
    return re.sub(r"[\s_-]+", "", name).lower()


def has(name: Table, entry: str) -> bool:
    """Whether a table has an entry of this name or spelling."""
    return _folded(entry) in _names(name)


def unknown(field: str, entry: object, names: Iterable[str]) -> SpecError:
    """The error for a name that is not an entry: the entries that it is the start of, or the nearest and all."""
    known = list(names)
    begun = [name for name in known if isinstance(entry, str) and _folded(name).startswith(_folded(entry))]
    if entry and begun:
        return SpecError(
            f"{field}={quoted(entry)} is not one entry of the catalogue; name {' or '.join(begun)}"
        )
    return unknown_name(field, entry, known)


def lookup(name: Table, entry: str, *, field: str) -> tuple[str, dict[str, Any]]:
    """The proper name and the fields of an entry, without its aliases.

    Raises:
        SpecError: There is none of this name, or it is the start of several.
    """
    proper = _names(name).get(_folded(entry)) if isinstance(entry, str) else None
    if proper is None:
        raise unknown(field, entry, table(name))
    return proper, {key: value for key, value in table(name)[proper].items() if key != "aliases"}
