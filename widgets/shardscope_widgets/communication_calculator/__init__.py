"""The communication calculator: time of a collective by algorithm, and where one algorithm overtakes another.

`CommunicationCalculator` holds the inputs as traits, which code can set and the controls show. `_controls` makes the
controls and `_views` the figures. All formulas are in `shardscope.analytic.communication`.
"""

from shardscope_widgets.communication_calculator._calculator import CommunicationCalculator

__all__ = ["CommunicationCalculator"]
