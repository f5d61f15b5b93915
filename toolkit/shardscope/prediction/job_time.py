"""Step time of a job from its traced operations, for every model that can be traced and every strategy."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import sent_bytes
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.terms import Term
from shardscope.prediction.rates import RankRates
from shardscope.spec.model.table import LayerTable

_PASSES = {"none": 3, "selective": 3, "full": 4}
"""Matrix products of a step, in forward passes: one forward, two backward, and one for full recomputation."""


def job_time_term(step: JobStep, table: LayerTable, traffic: Traffic | None, rates: RankRates) -> Term:
    """Seconds of one step as a sum of terms; no overlap is assumed.

    Each operation takes the time of its matrix products or of the memory that it moves, plus a launch. The optimizer
    reads and writes all its states. Communication is that of the rank that sends most: bytes, then messages.
    """
    job, trace = step.job, step.trace
    work, samples = max(job.strategy.work(step)), step.samples * step.micro_batches
    flops = _PASSES[job.recompute] * table.flops * samples * work
    moved = trace.moved_bytes * samples * work
    launched = trace.num_operations * step.micro_batches * work
    states = job.optimizer.states
    spread = job.world_size if job.strategy.zero_stage else 1
    updated = step.num_elements * step.element_bytes * (3 + 2 * states.tensors) / spread * min(1.0, work)
    num_bytes, messages = _sent(traffic)
    roofline = "roofline, Williams et al. 2009"
    parts = [
        _term("matrix products", flops / rates.flops, "FLOP / rate", rates, roofline, FLOP=flops, rate=rates.flops),
        _term(
            "other operations", moved / rates.bandwidth, "bytes / bandwidth", rates, roofline, bytes=moved,
            bandwidth=rates.bandwidth,
        ),
        _term(
            "launches", launched * rates.operation_s, "operations x time of one", rates, "traced", operations=launched
        ),
        _term(
            "optimizer update", updated / rates.bandwidth, "bytes / bandwidth", rates, "reads and writes of each state",
            bytes=updated,
        ),
        _term(
            "communication", num_bytes / rates.link + messages * rates.message_s,
            "bytes / bandwidth + messages x time of one", rates, "of the rank that sends most; no overlap",
            bytes=num_bytes, messages=messages, bandwidth=rates.link,
        ),
        _term("fixed cost", rates.step_s, "once a step", rates, "data, events, calls"),
    ]  # fmt: skip
    return Term.total("step", tuple(part for part in parts if part.value > 0))


def _sent(traffic: Traffic | None) -> tuple[float, float]:
    """Most bytes and most messages of any rank; a backend's collective, whose messages are unknown, counts W - 1."""
    if not traffic:
        return 0.0, 0.0
    messages = np.zeros(1)
    for sent in traffic.values():
        unknown = (sent.bytes > 0) & (sent.messages == 0)
        messages = messages + np.where(unknown, len(sent.bytes) - 1, sent.messages)
    return float(sent_bytes(traffic).max()), float(messages.max())


def _term(name: str, value: float, formula: str, rates: RankRates, source: str, **inputs: float) -> Term:
    return Term(name, float(value), "s", formula, inputs, f"{source}; {rates.source}")
