"""Utilization of processors and links: the time of a step at peak rates, divided by the step time."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from shardscope.analytic.compute.flops import model_flops
from shardscope.prediction.step.machine import Machine
from shardscope.spec.job import IN_LAYOUTS

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction


class AtPeak(NamedTuple):
    """Seconds of a step if all processors, or the busiest rank's link, always worked at their peak; None if unknown."""

    compute_s: float | None = None
    sending_s: float | None = None


def at_peak(found: JobPrediction) -> AtPeak:
    """Return the seconds at peak rates; for a run, they come from the prediction made at its launch.

    Both are unknown for jobs that communicate only in some steps. The compute time is also unknown if processors
    differ, and the communication time also if several ranks share a node, because not all of their messages use a link.
    """
    period = lcm(found.job.compression.period, getattr(found.job.strategy, "mix_every", 1))
    if not found.has_rates or found.time is None or period > 1:
        return AtPeak()
    rates, batch, model = found.rates, found.job.batch.global_batch, found.found.table.as_transformer
    flops = 3.0 * found.found.table.flops * batch if model is None else float(model_flops(model, batch))
    peak = rates.emulated_flops or rates.flops
    if found.cluster is not None and found.calibration is not None:
        precision = IN_LAYOUTS.get(found.job.precision, "fp32")
        peak = Machine.of(found.cluster, found.calibration, precision).peak
    sent = 0.0 if found.sent_bytes is None else float(found.sent_bytes.max())
    shares_nodes = found.cluster is not None and found.cluster.nodes > 1 and found.cluster.per_node > 1
    return AtPeak(
        None if len(set(found.step.slowness)) > 1 else flops / (peak * found.job.world_size),
        None if shares_nodes or not sent else sent / rates.link,
    )
