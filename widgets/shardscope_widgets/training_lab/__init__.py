"""The Training Lab: configure, start, watch, stop and compare real runs.

_runbook     the runs on disk
live         the live figures; `panels` and `_history` have further parts, and `_screen` the layout
_check       the correctness check, and `_forecast` the prediction, each in its own thread
_lab         the widget that connects these parts; `job_form` provides its inputs

All persistent state is on disk or in traits, so widgets can be discarded at any time.
"""

from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["JobChoices", "TrainingLab"]
