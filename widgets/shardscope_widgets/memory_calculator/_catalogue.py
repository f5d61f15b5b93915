"""The models that the calculator accepts, those in the catalogue or the config.json of a model, and the devices."""

from __future__ import annotations

from functools import cache

from shardscope.errors import SpecError
from shardscope.spec.cluster import Device
from shardscope.spec.model import Model, Transformer


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the transformers in the catalogue."""
    return tuple(name for name in Model.names() if isinstance(Model.of(name), Transformer))


find_device = cache(Device.of)
"""The device with a name from the catalogue, built once."""


def find_model(name: str) -> Transformer:
    """Return the transformer with this catalogue name, or the one described by a config.json at this path.

    Raises:
        SpecError: No such name or file exists, or the model is not a transformer.
    """
    model = Model.of(name)
    if not isinstance(model, Transformer):
        raise SpecError(f"model={name!r} is not a transformer; use one of {', '.join(model_names())}")
    return model
