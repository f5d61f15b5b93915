"""The Training Lab: configure, start, watch, stop and compare real runs.

_runbook     the runs on disk
live         the live figures; `panels` and `_history` contain other parts of the page, `_screen` arranges all parts
_presets     jobs to start with
_check       the correctness check, `_forecast` the prediction, `_advice` the explanation, each in its own thread
_queue       a suggested change that waits for its run to end; it is lost when the kernel ends
_lab         the widget that connects these parts; `job_form` provides its inputs

All other state is on disk or in traits, so widgets can be discarded at any time.
"""

from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.training_lab._lab import TrainingLab

__all__ = ["JobChoices", "TrainingLab"]
