"""The user interface: figures, Training Lab, Tuning Lab, Pipeline Explorer, Planner, calculators, ring view, report.

Names are imported on first use (PEP 562), so importing this package loads neither Plotly nor ipywidgets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope_widgets import figures
    from shardscope_widgets.communication_calculator import CommunicationCalculator
    from shardscope_widgets.html import summary
    from shardscope_widgets.memory_calculator import MemoryCalculator
    from shardscope_widgets.pipeline_explorer import PipelineExplorer
    from shardscope_widgets.planner import Planner
    from shardscope_widgets.report import write_report
    from shardscope_widgets.ring_view import RingView
    from shardscope_widgets.trace import Trace
    from shardscope_widgets.training_lab import TrainingLab
    from shardscope_widgets.tuning_lab import TuningLab

_HOMES = {
    "CommunicationCalculator": "shardscope_widgets.communication_calculator",
    "PipelineExplorer": "shardscope_widgets.pipeline_explorer",
    "MemoryCalculator": "shardscope_widgets.memory_calculator",
    "Planner": "shardscope_widgets.planner",
    "RingView": "shardscope_widgets.ring_view",
    "Trace": "shardscope_widgets.trace",
    "TrainingLab": "shardscope_widgets.training_lab",
    "TuningLab": "shardscope_widgets.tuning_lab",
    "summary": "shardscope_widgets.html",
    "write_report": "shardscope_widgets.report",
}

__all__ = [
    "CommunicationCalculator",
    "MemoryCalculator",
    "PipelineExplorer",
    "Planner",
    "RingView",
    "Trace",
    "TrainingLab",
    "TuningLab",
    "figures",
    "summary",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("shardscope_widgets.figures")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
