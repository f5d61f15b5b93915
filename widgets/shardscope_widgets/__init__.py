"""The user interface: figures, Training Lab, Tuning Lab, Pipeline Explorer, Planner, calculators, ring view, report.

Names are imported on first use (PEP 562), so importing this package loads neither Plotly nor ipywidgets.
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
