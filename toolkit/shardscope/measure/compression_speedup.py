"""Prediction of whether compression saves time for a job on a link, from a short probe and formulas.

The probe is a run of a few uncompressed steps of the job. It measures the compute time of a step, and the time to copy
and add one byte. The module `messages` measures the software overhead of a message, and `codecs` the packing time of
each method. Rounds and bytes on the wire come from formulas. The time of a step is

    T = compute + codec c + rounds (a + s) + bytes (1 / B + b)

where c is the crowding (the number of compute threads of all ranks divided by the number of cores, at least 1), a and B
are the latency and the bandwidth of the link, and s and b are the software overhead per message and per byte. Packing,
rounds and bytes are those of the job's own buckets, which one thread per rank exchanges in sequence. All
communication is assumed to be exposed, that is, not hidden behind the backward pass: the communication of the last
bucket is always exposed, and if a model fits on a laptop, its last bucket contains most of the parameters.
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
from shardscope.spec.units import seconds_text

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.15
"""Smallest predicted speed-up that counts as a gain, since predictions are accurate to 15 %."""


@dataclass(frozen=True)
class PredictedStep:
    """Predicted step time with one method, in seconds: compute, packing and unpacking, wire, software overhead.

    The software overhead is the time to hand over all messages, and to copy and add all bytes. On the machine's own
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
    """Predicted step times of all methods on one link.

    Attributes:
        link: Description of the link, such as ``a link of 100 Mbit/s, 1 ms``.
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
        """Whether the fastest step is faster than the uncompressed step by more than the prediction error."""
        return self.plain.step_s >= MARGIN * self.best.step_s

    @property
    def verdict(self) -> str:
        """Sentence that says whether compression saves time on the link."""
        best, plain = self.best, self.plain
        if not best.compression.is_on:
            step = f"the uncompressed step of {seconds_text(plain.step_s)} is the fastest"
            return f"On {self.link}, compression does not pay off: {step}."
        times = plain.step_s / best.step_s
        if not self.pays:
            gain = f"{best.compression.label} would be {100 * (times - 1):.0f} % faster, less than the prediction error"
            return f"On {self.link}, compression does not pay off: {gain}."
        return (
            f"On {self.link}, compression pays off: with {best.compression.label} a step takes "
            f"{seconds_text(best.step_s)} instead of {seconds_text(plain.step_s)} (a speed-up of {times:.3g}); the "
            "effect on the loss is not considered."
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

    If no probe is given, the job is first probed. A second short run then measures the overhead of small messages.

    Args:
        job: A job with the strategy ``ring`` or ``all-reduce``. Its own compression is ignored.
        methods: One or several methods, given by name or with their settings.
        link: The emulated link of each rank, or its name in the catalogue; None for the job's link, or for the
            machine's own if the job has none.
        probe: A finished run of the same job with more than 2 steps, uncompressed and without an emulated link; None
            runs one with 8 steps.

    Raises:
        SpecError: The job's strategy is neither ``ring`` nor ``all-reduce``, the job has only one rank, or a method is
            incompatible with the job or differs between steps. Also if the probe is a run of a different job or has no
            usable steps.
    """
    if not _in_a_ring(job.strategy) or job.world_size == 1:
        rings = strategies_where(_in_a_ring)
        raise SpecError(
            f"the effect of compression cannot be predicted for strategy={job.strategy.name!r} with "
            f"world_size={job.world_size}; use strategy={' or '.join(map(repr, rings))} and world_size=2 or more"
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
    own = 8 * found.sent_bytes / found.communication_s
    return Worth(
        f"the machine's own link ({own / 1e9:.3g} Gbit/s)" if link is None else f"a link of {link.label}",
        tuple(rows),
    )


def _byte_seconds(probe: Probed, handed_s: float) -> float:
    """Return the time to copy and add one byte, in seconds: the rest of the communication time, per byte sent.

    `handed_s` is the time spent on handing over all messages, in seconds, which is part of the communication time.
    """
    return max(0.0, probe.communication_s - handed_s) / probe.sent_bytes
