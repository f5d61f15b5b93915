"""The Tuning Lab: search the settings of a job by real runs, and watch the front grow.

`_search` is what can be searched, as rows, and the space that comes of them; `_engine` the thread that runs trials;
`_relink` re-projects finished trials onto another link; `_parts` are the widgets that ipywidgets lacks, `_controls`,
`_chosen` and `_screen` what is shown and where, `_code` a job as Python, `_words` what is said, and `_lab` wires them
together. All that matters is in the study's storage and in run directories.
"""

from shardscope_widgets.tuning_lab._lab import TuningLab

__all__ = ["TuningLab"]
