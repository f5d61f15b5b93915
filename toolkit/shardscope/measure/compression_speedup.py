"""Prediction of whether compression pays off for a job on a link, from a short probe and formulas.

The probe is a few uncompressed steps of the job on its real ranks. It measures the compute time of a step, and the time
to copy and add one byte. The software overhead of a message is measured by `messages`, and the packing time of each
method by `codecs`. Rounds and bytes on the wire come from formulas. The time of a step is

    T = compute + codec c + rounds (a + s) + bytes (1 / B + b)

with the crowding c, which is the compute threads of all ranks over the cores of the machine, at least 1; the latency a
and the bandwidth B of the link; the software overhead s of a message and b of a byte. Packing, rounds and bytes are
those of the job's own buckets, which one thread per rank exchanges one after the other. No communication is assumed to
be hidden behind the backward pass: that of the last bucket never is, and in a model that fits a laptop the last bucket
holds most of the parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.analytic.communication.exchange import exchange_time
from shardscope.errors import SpecError
from shardscope.measure.arguments import link_of, methods_of
from shardscope.measure.break_even import USUAL, exchange, gradient_buckets, refuse_unsteady
from shardscope.measure.codecs import codec_seconds
from shardscope.measure.messages import message_seconds
from shardscope.measure.probe import Probed, probe_of, probed
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.runtime import Run
from shardscope.spec import Compression, Job, Link
from shardscope.spec.strategy import Strategy, strategies_where

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.15
"""Predicted speed-up from which compression counts as worthwhile: predictions are accurate to 15 %."""


@dataclass(frozen=True)
class PredictedStep:
    """Predicted time of one method's step, in seconds: computing, packing and unpacking, the wire, software overhead.

    The software overhead is the time to hand over every message, and to copy and add every byte. On the machine's own
    link, copying and adding count as wire time instead.
    """

    compression: Compression
    sent_bytes: float
    compute_s: float
    codec_s: float
    wire_s: float
    software_s: float

    @property
    def step_s(self) -> float:
        """Time of the whole step, in seconds."""
        return self.compute_s + self.codec_s + self.wire_s + self.software_s


@dataclass(frozen=True)
class Worth:
    """Predicted steps of all methods on one link.

    Attributes:
        link: Description of the link in words.
        steps: One entry per method, the uncompressed step first.
    """

    link: str
    steps: tuple[PredictedStep, ...]

    @property
    def plain(self) -> PredictedStep:
        """The uncompressed step."""
        return self.steps[0]

    @property
    def best(self) -> PredictedStep:
        """The fastest step."""
        return min(self.steps, key=lambda step: step.step_s)

    @property
    def pays(self) -> bool:
        """Whether the fastest step is faster than the uncompressed one by more than the prediction error."""
        return self.plain.step_s >= MARGIN * self.best.step_s

    @property
    def verdict(self) -> str:
        """Sentence on whether compression pays off."""
        best, plain = self.best, self.plain
        if not best.compression.is_on:
            step = f"the uncompressed step of {plain.step_s:.3g} s is the fastest"
            return f"On {self.link} compressing does not pay: {step}."
        times = plain.step_s / best.step_s
        if not self.pays:
            gain = f"{best.compression.label} would be {100 * (times - 1):.0f} % faster, less than the prediction error"
            return f"On {self.link} compressing does not pay: {gain}."
        return (
            f"On {self.link} compressing pays: with {best.compression.label} a step takes {best.step_s:.3g} s instead "
            f"of {plain.step_s:.3g} s, {times:.3g} times as fast; the effect on the loss is not considered."
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per method, fastest first.

        Columns: method, step_s, compute_s, codec_s, wire_s, software_s, sent_bytes, and speed (the speed-up over the
        uncompressed step).
        """
        import pandas as pd

        rows = [
            {
                "method": step.compression.label, "step_s": step.step_s, "compute_s": step.compute_s,
                "codec_s": step.codec_s, "wire_s": step.wire_s, "software_s": step.software_s,
                "sent_bytes": step.sent_bytes, "speed": self.plain.step_s / step.step_s,
            }
            for step in sorted(self.steps, key=lambda step: step.step_s)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return self.verdict


def _in_a_ring(strategy: Strategy) -> bool:
    return isinstance(strategy, BucketedStrategy) and strategy.ring_directions is not None


def compression_speedup(
    job: Job,
    *,
    methods: Iterable[Compression | str] | Compression | str = USUAL,
    link: Link | str | None = None,
    probe: Run | None = None,
) -> Worth:
    """Predict a job's step time under each compression method, before any of them runs.

    Runs a probe of the job, unless one is given, and a second short run that sends small messages.

    Args:
        job: A job with the strategy ``ring`` or ``all-reduce``. Its own compression is ignored.
        methods: One or several methods, given by name or with their settings.
        link: The emulated link of each rank, or its name in the catalogue; None takes the job's link, or the machine's
            own if the job has none.
        probe: A finished run of the same job with more than 2 steps, uncompressed and without an emulated link; None
            runs one with 8 steps.

    Raises:
        SpecError: The job has another strategy or only one rank, or a method is incompatible with it. Also if the probe
            is a run of another job or has no usable steps.
    """
    if not _in_a_ring(job.strategy) or job.world_size == 1:
        rings = strategies_where(_in_a_ring)
        raise SpecError(
            f"compression is not predicted for strategy={job.strategy.name!r} on world_size={job.world_size}; "
            f"use strategy={' or '.join(map(repr, rings))} on 2 ranks or more"
        )
    link = job.link if link is None else link_of(link)
    compressions = [Compression("none"), *methods_of(methods)]
    for compression in compressions:
        refuse_unsteady(compression)
    jobs = [job.replace(compression=compression) for compression in compressions]
    found = probed(job, probe_of(job) if probe is None else probe)
    message_s = message_seconds(job, link)
    buckets, crowding = gradient_buckets(job), max(1.0, job.world_size * job.threads / (os.cpu_count() or 1))
    byte_s = _byte_seconds(found, exchange(jobs[0], buckets, job.world_size).rounds * message_s)
    rows = []
    for one in jobs:
        sent = exchange(one, buckets, job.world_size)
        handed, copied = sent.rounds * message_s, sent.sent_bytes * byte_s
        wire_s, software_s = (
            (copied, handed)
            if link is None
            else (float(exchange_time(sent, link.bandwidth, link.latency_s)), handed + copied)
        )
        codec_s = crowding * codec_seconds(one, buckets)
        rows.append(
            PredictedStep(one.compression, sent.sent_bytes, found.compute_s, codec_s, wire_s, software_s)
        )
    own = 8 * found.sent_bytes / found.talking_s
    return Worth(
        f"the machine's own link ({own / 1e9:.3g} Gbit/s)" if link is None else f"a link of {link.label}",
        tuple(rows),
    )


def _byte_seconds(probe: Probed, handed_s: float) -> float:
    """Return the time to copy and add one byte, in seconds.

    It is the communication time that remains after handing over all messages, per byte.
    """
    return max(0.0, probe.talking_s - handed_s) / probe.sent_bytes
