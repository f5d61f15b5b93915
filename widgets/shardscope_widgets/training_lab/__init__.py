"""The Training Lab: choose, start, watch, stop and compare real runs.

_choices     the inputs as traits, which `form` makes from the fields of a job
_families    the strategies and compressors to choose from, by family
_controls    the widgets bound to the traits, with `_picker` and `_options`
_runbook     the runs on disk
_live        the figures, with `_panels` and `_history`; `_screen` lays them out
_check       the check, and `_forecast` the prediction, each in its own thread
_driver      the thread that polls for new events
_guard       error handling
_lab         the widget that connects them

All state that matters is on disk or in traits, so every widget can be discarded.
"""

from shardscope_widgets.training_lab._choices import Choices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["Choices", "TrainingLab"]
