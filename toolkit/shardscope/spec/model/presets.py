"""Published models by name, from the catalogue."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardscope.spec import catalogue
from shardscope.spec.model.table import LayerTable
from shardscope.spec.model.transformer import Transformer


def preset(name: str) -> Transformer | LayerTable:
    """Return the model with this name, in any spelling, or with this alias.

    Raises:
        SpecError: The catalogue has no model of this name.
    """
    return _build(catalogue.lookup("models", name, field="model")[0])


@cache
def _build(name: str) -> Transformer | LayerTable:
    """Build a model; cached, since models are immutable."""
    fields = {key: value for key, value in catalogue.table("models")[name].items() if key not in _OTHER_KEYS}
    if "rows" in fields:
        return LayerTable(name=name, layers=_layers(**fields), source=fields["source"])
    return Transformer(name=name, **fields)


_OTHER_KEYS = {"aliases", "recalled"}


def _layers(columns: list[str], rows: list[list[Any]], **_: object) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(columns, row, strict=True)) for row in rows)
