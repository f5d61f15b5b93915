"""Models by name: published ones, from the catalogue, and the transformers that jobs train."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardscope.spec import catalogue
from shardscope.spec.model.table import LayerTable
from shardscope.spec.model.transformer import Transformer
from shardscope.spec.models import MODELS, GPTConfig


def preset(name: str) -> Transformer | LayerTable:
    """Return the published model with this name or alias, in any spelling, or the transformer that a job can name.

    Raises:
        SpecError: There is no such model.
    """
    own = name.lower().replace("_", "-")
    if isinstance(config := MODELS.get(own), GPTConfig):
        return config.transformer(own)
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
