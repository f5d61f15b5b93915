"""The Memory Calculator: a model, a layout and a device; what each pipeline stage would hold, and why.

`_choices` holds what can be chosen as traits, `_catalogue` the models and devices there are to choose from, `_controls`
the widgets bound to the traits, `_verdict` the sentence, and `_calculator` wires them together.
"""

from shardscope_widgets.memory_calculator._calculator import MemoryCalculator
from shardscope_widgets.memory_calculator._choices import Choices
from shardscope_widgets.memory_calculator._verdict import Verdict, verdict

__all__ = ["Choices", "MemoryCalculator", "Verdict", "verdict"]
