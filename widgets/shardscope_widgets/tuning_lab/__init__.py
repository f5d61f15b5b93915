"""The Tuning Lab: search the settings of a job by real runs, and watch the front grow.

`_search` has the settings that can be searched, as rows, and the space that they make. `_engine` is the thread that
runs trials. `_relink` re-projects finished trials onto another link. `_parts` are the widgets that ipywidgets lacks.
`_controls`, `_chosen` and `_screen` are the display and its layout, `_code` writes a job as Python, `_words` has the
texts, and `_lab` connects them. All state that must persist is in the study's storage and in run directories.
"""

from shardscope_widgets.tuning_lab._lab import TuningLab

__all__ = ["TuningLab"]
