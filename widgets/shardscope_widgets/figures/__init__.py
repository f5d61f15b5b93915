"""Figures: pure functions that turn the data of runs into Plotly figures.

``figures.loss(traces)`` draws one. ``figures.info(figures.loss, traces)`` returns the values that it draws, and
``figures.caption(figures.links, traces)`` says in words what a figure shows.

Example:
    >>> from shardscope_widgets import Trace, figures
    >>> figures.loss([Trace.read(run) for run in ss.runs()[:3]])  # doctest: +SKIP
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
