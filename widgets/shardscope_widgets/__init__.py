"""The user interface: figures, Lab, Training, Tuning and Fault Lab, Twin, Pipeline Explorer, Planner, calculators.

Names are imported on first use (PEP 562), so importing this package loads neither Plotly nor ipywidgets.
"""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
