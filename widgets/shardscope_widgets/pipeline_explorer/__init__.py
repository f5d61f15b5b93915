"""The Pipeline Explorer: every schedule drawn operation by operation, with its bubble and its memory.

_explorer     the widget: choices as traits, their controls, and the callbacks
_comparison   all schedules compared for the chosen numbers, by the closed forms
"""

from shardscope_widgets.pipeline_explorer._explorer import PipelineExplorer

__all__ = ["PipelineExplorer"]
