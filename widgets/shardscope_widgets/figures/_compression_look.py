"""Plot styles of compression methods: a family shares a hue; its methods differ in brightness, dash and marker."""

from __future__ import annotations

from shardscope.spec import Compression, registry
from shardscope.spec.look import MethodStyle
from shardscope_widgets.figures import theme


def method_look(name: str) -> MethodStyle:
    """Return the plot style of a method; an unknown method gets a spare colour that depends only on its name."""
    method = registry.find(Compression, name)
    return method.look if method else MethodStyle(theme.strategy_colour(name), "dash", "x")
