"""The communication calculator: how long a collective takes, by which algorithm, and where one overtakes another.

`CommunicationCalculator` holds what is asked as traits, which code can set and the controls show; `_controls` makes the
controls, `_views` what is drawn. All formulas are in `shardscope.analytic.communication`.
"""

from shardscope_widgets.communication_calculator._calculator import CommunicationCalculator

__all__ = ["CommunicationCalculator"]
