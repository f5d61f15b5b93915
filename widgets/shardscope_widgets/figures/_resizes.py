"""Marks at the steps at which the number of ranks of a run changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.spec.units import plural
from shardscope_widgets.figures import theme

if TYPE_CHECKING:
    from shardscope_widgets.figures._curves import RunCurvesInfo

_MOST = 12
"""Maximum number of marks: the newest ones of all runs together."""


def resize_notes(info: RunCurvesInfo, *, x: str = "x", y: str = "y") -> list[dict[str, Any]]:
    """Return a mark at the step axis for each change of the number of ranks, with the new number.

    Args:
        info: The curves.
        x: Plotly reference of the step axis.
        y: Plotly reference of the value axis.
    """
    changes = [(step, curve, ranks) for curve in info.curves for step, ranks in curve.resizes]
    return [
        {
            "text": plural(ranks, "rank") if len(info.curves) == 1 else f"{curve.label}: {plural(ranks, 'rank')}",
            "x": step, "xref": x, "y": 0, "yref": f"{y} domain", "ax": 0, "ay": -16, "showarrow": True, "arrowhead": 0,
            "arrowwidth": 1, "arrowcolor": curve.look.colour, "font": {"size": 11, "color": theme.GREY},
        }
        for step, curve, ranks in sorted(changes, key=lambda change: change[0])[-_MOST:]
    ]  # fmt: skip
