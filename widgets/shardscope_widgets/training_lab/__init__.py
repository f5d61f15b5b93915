"""The Training Lab: choose, start, watch, stop and compare real runs.

_runbook     the runs on disk
live         the figures, with `panels` and `_history`; `_screen` lays them out
_check       the check, and `_forecast` the prediction, each in its own thread
_lab         the widget that connects them; `job_form` has its inputs

All state that matters is on disk or in traits, so every widget can be discarded.
"""

from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["JobChoices", "TrainingLab"]
