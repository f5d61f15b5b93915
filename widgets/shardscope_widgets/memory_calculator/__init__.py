"""The Memory Calculator: memory of each pipeline stage for a model, layout and device, with the formulas.

`_choices` defines the inputs as traits, `_catalogue` lists the available models, `_controls` creates the widgets bound
to the traits, `_verdict` decides whether the layout fits, and `_calculator` connects these parts.
"""

from shardscope_widgets.memory_calculator._calculator import MemoryCalculator
from shardscope_widgets.memory_calculator._choices import MemoryChoices
from shardscope_widgets.memory_calculator._verdict import Verdict, verdict

__all__ = ["MemoryChoices", "MemoryCalculator", "Verdict", "verdict"]
