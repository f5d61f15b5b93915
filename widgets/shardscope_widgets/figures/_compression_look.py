"""Looks of compression methods: a family shares a hue, and its methods differ by brightness, dash and marker."""

from __future__ import annotations

from shardscope.spec import Compression, registry
from shardscope.spec.look import MethodStyle
from shardscope_widgets.figures import theme


def method_look(name: str) -> MethodStyle:
    """The look of a method; an unknown one gets a spare colour that depends on its name."""
    method = registry.find(Compression, name)
    return method.look if method else MethodStyle(theme.strategy_colour(name), "dash", "x")
