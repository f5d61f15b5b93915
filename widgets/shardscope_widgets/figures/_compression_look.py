"""One look a compression method: families share a hue, methods within one differ by brightness, dash and marker."""

from __future__ import annotations

from typing import NamedTuple

from shardscope_widgets.figures import theme


class MethodLook(NamedTuple):
    """Colour, dash and marker of a method."""

    colour: str
    dash: str
    symbol: str


_BLUE, _ORANGE, _GREEN, _PURPLE, _GOLD = "#2a86d1", "#e06c2c", "#11997a", "#b866a6", "#c49a0c"
LOOKS = {
    "none": MethodLook(theme.GREY, "solid", "circle"),
    "fp16": MethodLook("#8b8f99", "dash", "circle-open"),
    "bf16": MethodLook("#8b8f99", "dot", "circle"),
    "fp8": MethodLook(theme.tint(_BLUE, 0.4), "dashdot", "square-open"),
    "int8": MethodLook(_BLUE, "solid", "square"),
    "int4": MethodLook(theme.tint(_BLUE, 0.25), "dash", "square"),
    "qsgd": MethodLook("#5f6fd6", "dot", "square-open"),
    "terngrad": MethodLook("#5f6fd6", "dashdot", "diamond-open"),
    "natural": MethodLook("#5f6fd6", "longdash", "diamond"),
    "sign": MethodLook(_PURPLE, "solid", "triangle-up"),
    "sign-vote": MethodLook(_PURPLE, "dot", "triangle-up-open"),
    "onebit-adam": MethodLook(_PURPLE, "dash", "triangle-down"),
    "onebit-lamb": MethodLook(_PURPLE, "dashdot", "triangle-down-open"),
    "topk": MethodLook(_ORANGE, "solid", "diamond"),
    "randomk": MethodLook(_ORANGE, "dot", "diamond-open"),
    "randomblock": MethodLook(_ORANGE, "dash", "diamond-wide"),
    "dgc": MethodLook("#a35a3a", "dashdot", "diamond-tall"),
    "powersgd": MethodLook(_GREEN, "solid", "star"),
    "adaptive-rank": MethodLook(_GREEN, "dash", "star-open"),
    "adaptive-bits": MethodLook(_BLUE, "longdashdot", "cross"),
    "local-sgd": MethodLook(_GOLD, "solid", "hexagon"),
}


def method_look(name: str) -> MethodLook:
    """The look of a method; one that is not in the table gets a spare colour by its name."""
    return LOOKS.get(name) or MethodLook(theme.strategy_colour(name), "dash", "x")
