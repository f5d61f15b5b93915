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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardscope.analytic.communication.exchange import exchange_time, level_rate
from shardscope.errors import SpecError
from shardscope.machine import usable_cores
from shardscope.measure.arguments import bandwidth_of, link_of, methods_of
from shardscope.measure.break_even import USUAL, exchange, gradient_buckets, refuse_unsteady
from shardscope.measure.codecs import codec_seconds
from shardscope.measure.loss_increase import MEASURED_ON, is_within_tolerance, loss_text
from shardscope.measure.messages import message_seconds
from shardscope.measure.probe import Probed, probe_of, probed
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.runtime import Run
from shardscope.spec import Compression, Job, Link
from shardscope.spec.strategy import Strategy, strategies_where
from shardscope.spec.units import duration_text

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
        emulated: The link; None for the machine's own.
        optimizer: Name of the job's optimizer.
    """

    link: str
    steps: tuple[PredictedStep, ...]
    emulated: Link | None = None
    optimizer: str = "adamw"

    @property
    def plain(self) -> PredictedStep:
        """The uncompressed step."""
        return self.steps[0]

    @property
    def best(self) -> PredictedStep:
        """The fastest step."""
        return min(self.steps, key=lambda step: step.step_s)

    @property
    def harmless(self) -> tuple[PredictedStep, ...]:
        """The steps whose method's loss increase is within its tolerance, and the uncompressed step."""
        return tuple(step for step in self.steps if is_within_tolerance(step.compression, self.optimizer))

    @property
    def recommended(self) -> PredictedStep:
        """The fastest step whose method's loss increase is within its tolerance."""
        return min(self.harmless, key=lambda step: step.step_s)

    def speedup(self, step: PredictedStep) -> float:
        """Return how many times faster a step is than the uncompressed step."""
        return self.plain.step_s / step.step_s

    def at(self, bandwidth: float | str) -> Worth:
        """Return the prediction for a link with another bandwidth and the same latency; nothing is measured again.

        Args:
            bandwidth: In bytes per second or as text with a unit, such as ``"1 Gbit/s"``.

        Raises:
            SpecError: The bandwidth is not valid, or the prediction is for the machine's own link.
        """
        rate, link = bandwidth_of(bandwidth), self._emulated()
        longer = 1 / rate - 1 / link.bandwidth
        steps = tuple(replace(step, wire_s=step.wire_s + step.sent_bytes * longer) for step in self.steps)
        other = Link(bandwidth=rate, latency_s=link.latency_s)
        return Worth(f"a link of {other.label}", steps, other, self.optimizer)

    def pays_below(self, step: PredictedStep, *, margin: float = MARGIN) -> float:
        """Return the bandwidth in bytes per second below which a whole step is `margin` times faster than plain.

        It is 0 if that is so on no link, and infinite if it is so on any.

        Args:
            step: One of `steps`.
            margin: The speed-up that counts as a gain.

        Raises:
            SpecError: The prediction is for the machine's own link.
        """
        rate = self._emulated().bandwidth
        rest, plain_rest = (one.step_s - one.sent_bytes / rate for one in (step, self.plain))
        return float(level_rate(self.plain.sent_bytes - margin * step.sent_bytes, margin * rest - plain_rest))

    def _emulated(self) -> Link:
        if self.emulated is None:
            raise SpecError(
                "a prediction for the machine's own link does not depend on a bandwidth; pass "
                "link=Link(bandwidth='1 Gbit/s', latency='1 ms') to compression_speedup"
            )
        return self.emulated

    @property
    def pays(self) -> bool:
        """Whether the fastest step is faster than the uncompressed step by more than the prediction error."""
        return self.plain.step_s >= MARGIN * self.best.step_s

    @property
    def verdict(self) -> str:
        """Sentence that says whether compression saves time on the link."""
        best, plain, chosen = self.best, self.plain, self.recommended
        if not best.compression.is_on:
            step = f"the uncompressed step of {duration_text(plain.step_s)} is the fastest"
            return f"On {self.link}, compression does not pay off: {step}."
        if not self.pays:
            gain = f"{best.compression.label} would be {self.speedup(best) - 1:.0%} faster"
            return f"On {self.link}, compression does not pay off: {gain}, less than the prediction error."
        if self.speedup(chosen) < MARGIN:
            return f"On {self.link}, compression pays off only at a cost: {self._takes(best)}. Losses: {MEASURED_ON}."
        faster = (
            ""
            if chosen is best
            else f" {best.compression.label} would be faster (a speed-up of {self.speedup(best):.3g}), but "
            f"{self._loss(best)}."
        )
        return f"On {self.link}, compression pays off: {self._takes(chosen)}.{faster} Losses: {MEASURED_ON}."

    def _takes(self, step: PredictedStep) -> str:
        return (
            f"with {step.compression.label} a step takes {duration_text(step.step_s)} instead of "
            f"{duration_text(self.plain.step_s)} (a speed-up of {self.speedup(step):.3g}; {self._loss(step)})"
        )

    def _loss(self, step: PredictedStep) -> str:
        return loss_text(step.compression, self.optimizer, with_tolerance=True)

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
    buckets, crowding = gradient_buckets(job), max(1.0, job.world_size * job.threads / usable_cores())
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
        link,
        job.optimizer.name,
    )


def _byte_seconds(probe: Probed, handed_s: float) -> float:
    """Return the time to copy and add one byte, in seconds: the rest of the communication time, per byte sent.

    `handed_s` is the time spent on handing over all messages, in seconds, which is part of the communication time.
    """
    return max(0.0, probe.communication_s - handed_s) / probe.sent_bytes
