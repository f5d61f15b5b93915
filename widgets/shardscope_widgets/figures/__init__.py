"""Figures: pure functions that turn the data of runs into Plotly figures.

Every figure has two functions: for example, ``loss_info(traces)`` computes plain values, which tests can compare with
``==``, and ``loss(traces)`` draws them. Functions such as ``timeline_text`` describe a figure in words, for use as a
caption.

Example:
    >>> from shardscope_widgets import figures
    >>> figures.loss([figures.Trace.read(run) for run in ss.runs()[:3]])  # doctest: +SKIP
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
