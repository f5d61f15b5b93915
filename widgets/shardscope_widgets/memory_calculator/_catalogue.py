"""The models that the calculator offers: catalogue entries, or a model's config.json."""

from __future__ import annotations

from functools import cache

from shardscope.errors import SpecError
from shardscope.spec.model import Model, Transformer


@cache
def model_names() -> tuple[str, ...]:
    """Names of the catalogue's transformers."""
    return tuple(name for name in Model.names() if isinstance(Model.of(name), Transformer))


def find_model(name: str) -> Transformer:
    """The transformer of a name, or the one that a config.json describes.

    Raises:
        SpecError: Neither exists, or the model is not a transformer.
    """
    model = Model.of(name)
    if not isinstance(model, Transformer):
        raise SpecError(f"model={name!r} is not a transformer; use one of {', '.join(model_names())}")
    return model
