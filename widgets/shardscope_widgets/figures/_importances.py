"""Parameter importances of a study: the share of the objective's variance that Optuna attributes to each setting."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope_widgets.figures import theme
from shardscope_widgets.figures._trials import title_of
from shardscope_widgets.words import plural

Spec = dict[str, Any]
FEWEST = 6
"""Minimum number of complete trials needed to fit importances."""
PER_SETTING = 2
"""Minimum number of complete trials per searched setting: with fewer, importances follow single trials."""


class ImportancesInfo(NamedTuple):
    """Settings with their shares of the variance, largest first; the study has `trials` complete trials, and the fit
    needs `needed`.
    """

    objective: str
    names: tuple[str, ...]
    shares: tuple[float, ...]
    trials: int
    needed: int = FEWEST


def trials_needed(num_settings: int) -> int:
    """Return the number of complete trials needed to fit the importances of `num_settings` searched settings."""
    return max(FEWEST, PER_SETTING * num_settings)


def importances_info(
    shares: Mapping[str, float], *, objective: str, trials: int, needed: int = FEWEST
) -> ImportancesInfo:
    """Sort the shares from `optuna.importance.get_param_importances`.

    Args:
        shares: Share of the variance by setting; empty if there are too few trials.
        objective: Name of the objective.
        trials: Number of complete trials.
        needed: Number of complete trials that the fit needs; see `trials_needed`.
    """
    known = sorted(((name, share) for name, share in shares.items()), key=lambda item: -item[1])
    return ImportancesInfo(objective, tuple(n for n, _ in known), tuple(s for _, s in known), trials, needed)


def importances_text(info: ImportancesInfo) -> str:
    """Return sentences on the most important setting, or a sentence on why importances are unknown."""
    what = title_of(info.objective)
    if info.trials < info.needed:
        return f"Importances for {what} need {info.needed} complete trials; so far there are {info.trials or 'none'}."
    if not any(info.shares):
        return f"No setting explains the differences in {what} among {plural(info.trials, 'trial')}."
    return (
        f"Fitted for {what} on {plural(info.trials, 'complete trial')}: {info.names[0]} matters most "
        f"({info.shares[0]:.0%} of the variance). A setting of one choice, such as of one optimizer, is "
        "compared only among the trials with that choice."
    )


def importances_spec(info: ImportancesInfo) -> Spec:
    """Return the bars as Plotly JSON."""
    most = max(info.shares, default=0.0) or 1.0
    bars = {
        "type": "bar", "orientation": "h", "x": list(info.shares), "y": list(info.names),
        "marker": {"color": [theme.tint("#2a6fb5", 0.5 * (1 - share / most)) for share in info.shares]},
        "text": [f"{share:.0%}" for share in info.shares], "textposition": "outside", "cliponaxis": False,
        "hovertemplate": "%{y}: %{x:.1%}<extra></extra>",
    }  # fmt: skip
    return {"data": [bars], "layout": _layout() | {"height": 64 + 26 * max(1, len(info.names))}}


def importances(info: ImportancesInfo) -> go.Figure:
    """Draw the importance of each setting as a bar."""
    return go.Figure(importances_spec(info))


@cache
def _layout() -> Spec:
    look = theme.look(height=100, margin={"l": 8, "r": 54, "t": 8, "b": 8}, showlegend=False)
    rows = {"autorange": "reversed", "showgrid": False, "automargin": True, "ticklabelstandoff": 5}
    title = "share of the objective's variance that the setting explains"
    return look | {"xaxis": theme.axis(title, tickformat=".0%", rangemode="tozero"), "yaxis": rows}
