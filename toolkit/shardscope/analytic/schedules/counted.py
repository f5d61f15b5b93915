"""Bubble and activation memory computed from a schedule's table, for schedules without a closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardscope.analytic.schedules.build import build
from shardscope.analytic.schedules.paths import Case, Floats
from shardscope.spec.pipeline_schedule import PipelineSchedule


def in_flight(schedule: PipelineSchedule, rank: Any, ranks: Any, microbatches: Any, held: Any) -> Floats:
    """Return the value of `PipelineSchedule.in_flight`, computed from a table for each element of the arguments."""

    def count(at: float, p: float, m: float, v: float) -> float:
        return build(schedule, int(p), int(m), int(v)).peak_activation()[int(at)]

    return np.asarray(np.vectorize(count, otypes=[float])(rank, ranks, microbatches, held))


def bubble(schedule: PipelineSchedule, case: Case, held: Any, *, ranks_meet: bool) -> Floats:
    """Return the value of `PipelineSchedule.bubble`, computed from a table for each element of the arguments.

    If ranks synchronise between steps (`ranks_meet`), the bubble is the time of the whole step minus a rank's work;
    otherwise, it is the longest path from a rank's first to its last operation, minus this work. Shorter operations
    make neither time longer.
    """

    def count(*asked: float) -> float:
        p, m, f, i, w, v = asked
        timeline = build(schedule, int(p), int(m), int(v)).timeline({"F": f, "I": i, "W": w})
        whole = timeline.end if ranks_meet else timeline.longest_own_path
        return max(0.0, whole - m * v * (f + i + w))

    return np.asarray(np.vectorize(count, otypes=[float])(*case, held))
