"""The Training Lab: choose, start, watch, stop and compare real runs.

`_choices` holds what can be chosen as traits, which `form` makes from the fields of a job, `_families` what there is to
choose among strategies, `_controls`, `_picker` and `_options` the widgets bound to them, `_runbook` the runs on disk,
`_live`, `_panels` and `_history` what is drawn and `_screen` where it stands, `_check` the check and `_forecast` the
prediction, each in its thread, `_driver` the thread that looks for news, `_guard` what becomes of errors, and `_lab`
wires them together. All state that matters is on disk or in traits; every widget can be thrown away.
"""

from shardscope_widgets.training_lab._choices import Choices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["Choices", "TrainingLab"]
