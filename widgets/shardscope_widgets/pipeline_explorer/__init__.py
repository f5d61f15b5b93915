"""The Pipeline Explorer: pipeline schedules drawn operation by operation, with bubble and activation memory.

_explorer     the widget: choices as traits, their controls, and the callbacks
_comparison   a comparison of all schedules for the chosen inputs, from closed-form formulas
"""

from shardscope_widgets.pipeline_explorer._explorer import PipelineExplorer

__all__ = ["PipelineExplorer"]
