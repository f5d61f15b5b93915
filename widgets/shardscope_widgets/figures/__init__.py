"""Figures: pure functions from the data of runs to a Plotly figure.

Every figure has two functions: ``loss_info(traces)`` computes plain values, which tests compare by ``==``, and
``loss(traces)`` draws them. Functions such as ``timeline_text`` describe a figure in words, for a caption.

Example:
    >>> from shardscope_widgets import figures
    >>> figures.loss([figures.Trace.read(run) for run in ss.runs()[:3]])  # doctest: +SKIP
"""

from shardscope_widgets.figures._batch_sweep import (
    SweepInfo,
    batch_sweep,
    batch_sweep_info,
    batch_sweep_text,
    draw_batch_sweep,
)
from shardscope_widgets.figures._break_even import (
    BreakEvenInfo,
    break_even,
    break_even_info,
    break_even_text,
)
from shardscope_widgets.figures._collectives import (
    CollectivesInfo,
    collectives,
    collectives_info,
    collectives_text,
)
from shardscope_widgets.figures._communication import Question as CommunicationQuestion
from shardscope_widgets.figures._communication import by_size_info, by_workers_info, efficiency_info
from shardscope_widgets.figures._communication_plots import (
    by_size,
    by_workers,
    curves_text,
)
from shardscope_widgets.figures._comparison import Row, comparison, comparison_info, comparison_text
from shardscope_widgets.figures._compression import (
    CompressionInfo,
    compression,
    compression_info,
    compression_text,
)
from shardscope_widgets.figures._compression import draw as draw_compression
from shardscope_widgets.figures._consensus import ConsensusInfo, consensus, consensus_info, consensus_text
from shardscope_widgets.figures._consensus import draw as draw_consensus
from shardscope_widgets.figures._curves import (
    Curve,
    CurvesInfo,
    loss,
    loss_info,
    throughput,
    throughput_info,
    traffic,
    traffic_info,
)
from shardscope_widgets.figures._efficiency import efficiency, efficiency_text
from shardscope_widgets.figures._front import FrontInfo, front, front_info, front_text
from shardscope_widgets.figures._importances import (
    ImportancesInfo,
    importances,
    importances_info,
    importances_text,
)
from shardscope_widgets.figures._layers import LayersInfo, layers, layers_info, layers_info_of, layers_text
from shardscope_widgets.figures._layers import draw as draw_layers
from shardscope_widgets.figures._lineage import LineageInfo, lineage, lineage_info, lineage_text
from shardscope_widgets.figures._lineage import draw as draw_lineage
from shardscope_widgets.figures._links import LinksInfo, links, links_info, links_text
from shardscope_widgets.figures._lr_range import LrRangeInfo, lr_range, lr_range_info, lr_range_text
from shardscope_widgets.figures._lr_range import draw as draw_lr_range
from shardscope_widgets.figures._memory import MemoryBars, MemoryInfo, memory, memory_info
from shardscope_widgets.figures._memory_kinds import (
    MemoryKindsInfo,
    memory_kinds,
    memory_kinds_info,
    memory_kinds_text,
)
from shardscope_widgets.figures._memory_kinds import draw as draw_memory_kinds
from shardscope_widgets.figures._memory_plan import (
    MemoryPlanInfo,
    memory_plan,
    memory_plan_info,
    memory_plan_text,
)
from shardscope_widgets.figures._noise_scale import (
    NoiseScaleInfo,
    noise_scale,
    noise_scale_info,
    noise_scale_info_of,
    noise_scale_text,
)
from shardscope_widgets.figures._noise_scale import draw as draw_noise_scale
from shardscope_widgets.figures._overview import OverviewInfo, overview, overview_info
from shardscope_widgets.figures._parallel import ParallelInfo, parallel, parallel_info, parallel_text
from shardscope_widgets.figures._pipeline import GanttInfo, GanttOp, gantt, gantt_info, gantt_text
from shardscope_widgets.figures._pipeline import draw as draw_gantt
from shardscope_widgets.figures._plans import (
    PlansInfo,
    TermsInfo,
    plan_rejections,
    plan_terms,
    plans,
    plans_info,
    plans_text,
    terms_info,
)
from shardscope_widgets.figures._predicted import ComparedInfo, compared, compared_info, draw_compared
from shardscope_widgets.figures._ring import RingInfo, Transfer, ring, ring_info, ring_text
from shardscope_widgets.figures._schedule import ScheduleInfo, schedule, schedule_info, schedule_text
from shardscope_widgets.figures._slices import SlicesInfo, slices, slices_info, slices_text
from shardscope_widgets.figures._staleness import StalenessInfo, staleness, staleness_info, staleness_text
from shardscope_widgets.figures._staleness import draw as draw_staleness
from shardscope_widgets.figures._timeline import (
    Bar,
    Shares,
    TimelineInfo,
    timeline,
    timeline_info,
    timeline_text,
)
from shardscope_widgets.figures._trial_curves import (
    TrialCurvesInfo,
    trial_curves,
    trial_curves_info,
    trial_curves_text,
)
from shardscope_widgets.figures._trials import TrialInfo, trials_info
from shardscope_widgets.steps import Step
from shardscope_widgets.trace import Trace

__all__ = [
    "SweepInfo",
    "batch_sweep",
    "batch_sweep_info",
    "batch_sweep_text",
    "draw_batch_sweep",
    "BreakEvenInfo",
    "CompressionInfo",
    "break_even",
    "break_even_info",
    "break_even_text",
    "compression",
    "compression_info",
    "compression_text",
    "draw_compression",
    "CommunicationQuestion",
    "by_size",
    "by_size_info",
    "by_workers",
    "by_workers_info",
    "curves_text",
    "efficiency",
    "efficiency_info",
    "efficiency_text",
    "Bar",
    "Curve",
    "CurvesInfo",
    "MemoryBars",
    "MemoryInfo",
    "OverviewInfo",
    "ParallelInfo",
    "parallel",
    "parallel_info",
    "parallel_text",
    "RingInfo",
    "Row",
    "Shares",
    "Step",
    "TimelineInfo",
    "Trace",
    "Transfer",
    "ComparedInfo",
    "compared",
    "compared_info",
    "draw_compared",
    "comparison",
    "comparison_info",
    "comparison_text",
    "loss",
    "loss_info",
    "memory",
    "memory_info",
    "overview",
    "overview_info",
    "ring",
    "ring_info",
    "ring_text",
    "throughput",
    "throughput_info",
    "timeline",
    "timeline_info",
    "timeline_text",
    "traffic",
    "traffic_info",
    "ConsensusInfo",
    "consensus",
    "consensus_info",
    "consensus_text",
    "LinksInfo",
    "links",
    "links_info",
    "links_text",
    "MemoryKindsInfo",
    "memory_kinds",
    "memory_kinds_info",
    "memory_kinds_text",
    "GanttInfo",
    "GanttOp",
    "gantt",
    "gantt_info",
    "gantt_text",
    "ScheduleInfo",
    "schedule",
    "schedule_info",
    "schedule_text",
    "StalenessInfo",
    "staleness",
    "staleness_info",
    "staleness_text",
    "PlansInfo",
    "TermsInfo",
    "plan_rejections",
    "plan_terms",
    "plans",
    "plans_info",
    "plans_text",
    "terms_info",
    "draw_consensus",
    "draw_gantt",
    "draw_memory_kinds",
    "MemoryPlanInfo",
    "memory_plan",
    "memory_plan_info",
    "memory_plan_text",
    "draw_staleness",
    "LayersInfo",
    "draw_layers",
    "layers",
    "layers_info",
    "layers_info_of",
    "layers_text",
    "LineageInfo",
    "draw_lineage",
    "lineage",
    "lineage_info",
    "lineage_text",
    "LrRangeInfo",
    "draw_lr_range",
    "lr_range",
    "lr_range_info",
    "lr_range_text",
    "NoiseScaleInfo",
    "draw_noise_scale",
    "noise_scale",
    "noise_scale_info",
    "noise_scale_info_of",
    "noise_scale_text",
    "CollectivesInfo",
    "collectives",
    "collectives_info",
    "collectives_text",
    "FrontInfo",
    "front",
    "front_info",
    "front_text",
    "ImportancesInfo",
    "importances",
    "importances_info",
    "importances_text",
    "SlicesInfo",
    "slices",
    "slices_info",
    "slices_text",
    "TrialCurvesInfo",
    "trial_curves",
    "trial_curves_info",
    "trial_curves_text",
    "TrialInfo",
    "trials_info",
]
