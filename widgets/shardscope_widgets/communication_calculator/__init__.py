"""The communication calculator: the time of a collective with each algorithm, and where the fastest algorithm changes.

`CommunicationCalculator` has the inputs as traits, which the controls display and code can set. `_controls` builds
the controls and `_views` the figures. All formulas are in `shardscope.analytic.communication`.
"""

from shardscope_widgets.communication_calculator._calculator import CommunicationCalculator

__all__ = ["CommunicationCalculator"]
