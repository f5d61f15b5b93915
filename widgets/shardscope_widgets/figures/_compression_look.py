"""One look a compression method: families share a hue, methods within one differ by brightness, dash and marker."""

from __future__ import annotations

from shardscope.spec import Compression, registry
from shardscope.spec.look import Look
from shardscope_widgets.figures import theme


def method_look(name: str) -> Look:
    """The look of a method; one that is not known here gets a spare colour by its name."""
    method = registry.find(Compression, name)
    return method.look if method else Look(theme.strategy_colour(name), "dash", "x")
