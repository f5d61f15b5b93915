"""Figures: pure functions that turn the data of runs into Plotly figures.

``figures.loss(traces)`` draws a figure. ``figures.info(figures.loss, traces)`` returns the values that the figure
draws, and ``figures.caption(figures.links, traces)`` describes a figure in words.

Example:
    >>> from shardscope_widgets import Trace, figures
    >>> figures.loss([Trace.read(run) for run in ss.runs()[:3]])  # doctest: +SKIP
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
