"""The Tuning Lab: search for the best settings of a job with real runs, and watch the Pareto front grow.

`_search` has the settings that can be searched, as rows, and builds the search space from them. `_engine` is the
thread that runs trials. `_relink` predicts the times of finished trials on another network link. `_parts` has widgets
that ipywidgets lacks. `_controls`, `_chosen` and `_screen` are the display and its layout, `_code` writes a job as
Python code, `_words` has the texts, and `_lab` connects them. All persistent state is in the study's storage and in run
directories.
"""

from shardscope_widgets.tuning_lab._lab import TuningLab

__all__ = ["TuningLab"]
