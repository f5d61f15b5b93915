"""The Training Lab: choose, start, watch, stop and compare real runs.

`_choices` holds what can be chosen as traits, `_controls` the widgets bound to them, `_runbook` the runs on
disk, `_live` and `_history` what is drawn, `_driver` the thread that looks for news, and `_lab` wires them
together. All state that matters is on disk or in traits; every widget can be thrown away.
"""

from shardscope_widgets.training_lab._choices import Choices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["Choices", "TrainingLab"]
