"""Whole steps with and without compression on a link: predictions of `ss.predict`, with packing times measured here.

Packing is timed on one core. Ranks that share cores are assumed to be slower at packing by the same factor as at
computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from shardscope.analytic.communication.exchange import level_rate
from shardscope.errors import SpecError
from shardscope.machine import usable_cores
from shardscope.measure.compression.arguments import bandwidth_of, methods_of
from shardscope.measure.compression.break_even import USUAL, refuse_unsteady
from shardscope.measure.compression.codecs import codec_seconds
from shardscope.measure.compression.loss_increase import (
    MEASURED_ON,
    is_within_tolerance,
    loss_increase,
    loss_text,
)
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.rates import active_ranks, shared_slowdown
from shardscope.runtime import Run
from shardscope.show import Part, Sentences, Shown, Table
from shardscope.spec import Compression, Job, Link
from shardscope.spec.strategy import Strategy, strategies_where
from shardscope.spec.units import bit_rate_text, bytes_text, duration_text

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.15
"""Smallest predicted speed-up that counts as a gain: smaller ones are within the error of predictions."""
_OPEN = frozenset({"link", "steps", "name", "lr_schedule", "record"})
"""Fields in which a probe's job may differ from the job, because the compute time does not depend on them."""


@dataclass(frozen=True)
class PredictedStep:
    """Predicted step time with one method, in seconds.

    Attributes:
        compression: The method.
        sent_bytes: Bytes sent by the rank that sends most.
        compute_s: Time of everything except packing and communication.
        codec_s: Time for packing and unpacking, measured here.
        communication_s: Time of all messages.
    """

    compression: Compression
    sent_bytes: float
    compute_s: float
    codec_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """Time of the whole step, in seconds."""
        return self.compute_s + self.codec_s + self.communication_s


@dataclass(frozen=True, repr=False)
class Worth(Shown):
    """Predicted step times of all methods on one link.

    Attributes:
        link: Description of the link, such as ``a link of 100 Mbit/s, 1 ms``.
        steps: One entry per method, the uncompressed step first.
        emulated: The emulated link; None if the prediction is for the machine's own link.
        optimizer: Name of the job's optimizer.
        own_rate: Bytes per second that a rank can send without an emulated link, an upper bound for every link.
    """

    link: str
    steps: tuple[PredictedStep, ...]
    emulated: Link | None = None
    optimizer: str = "adamw"
    own_rate: float = inf

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
        """The uncompressed step, and the steps of methods whose measured loss increase is within their tolerance."""
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
        link = Link(bandwidth=bandwidth_of(bandwidth), latency_s=self._emulated().latency_s)
        longer = 1 / min(link.bandwidth, self.own_rate) - 1 / self._rate
        steps = (
            replace(step, communication_s=step.communication_s + step.sent_bytes * longer)
            for step in self.steps
        )
        return replace(self, link=f"a link of {link.label}", steps=tuple(steps), emulated=link)

    def pays_below(self, step: PredictedStep, *, margin: float = MARGIN) -> float:
        """Return the bandwidth in bytes per second below which a whole step is `margin` times faster than uncompressed.

        It is 0 if the step is not that much faster on any link, and infinite if it is on every link.

        Args:
            step: One of `steps`.
            margin: The speed-up that counts as a gain.

        Raises:
            SpecError: The prediction is for the machine's own link.
        """
        rest, plain_rest = (one.step_s - one.sent_bytes / self._rate for one in (step, self.plain))
        saved = self.plain.sent_bytes - margin * step.sent_bytes
        level = float(level_rate(saved, margin * rest - plain_rest))
        return inf if level >= self.own_rate else level

    @property
    def _rate(self) -> float:
        return min(self._emulated().bandwidth, self.own_rate)

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

    @property
    def limit(self) -> str:
        """Sentence that says below which bandwidth which method pays off, among those within their tolerance.

        Raises:
            SpecError: The prediction is for the machine's own link.
        """
        packed = [step for step in self.harmless if step.compression.is_on]
        chosen = max(packed, key=lambda step: (self.pays_below(step), -step.step_s), default=self.plain)
        level, nothing = self.pays_below(chosen), "no method whose loss stays within its tolerance gains"
        if not chosen.compression.is_on or not level:
            return f"On no link does compression pay off: {nothing} {MARGIN - 1:.0%}."
        name, fastest = chosen.compression.label, min(packed, key=lambda step: step.step_s).compression.label
        use = f"use {name}" if name == fastest else f"use {name}, or on {self.link} {fastest}"
        if level == inf:
            return f"On any link {use}."
        return f"Below {bit_rate_text(level)} {use}; above it {nothing} {MARGIN - 1:.0%}."

    def _takes(self, step: PredictedStep) -> str:
        return (
            f"with {step.compression.label} a step takes {duration_text(step.step_s)} instead of "
            f"{duration_text(self.plain.step_s)} (a speed-up of {self.speedup(step):.3g}; {self._loss(step)})"
        )

    def _loss(self, step: PredictedStep) -> str:
        return loss_text(step.compression, self.optimizer, with_tolerance=True)

    @property
    def losses(self) -> pd.DataFrame:
        """By how many percent each method raises the loss, measured with each optimizer; see `loss_increase`."""
        return loss_increase()

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per method, fastest first.

        Columns: method, step_s, compute_s, codec_s, communication_s, sent_bytes, speed (the speed-up over the
        uncompressed step), loss (the method's effect on it, as text), and is_harmless (whether that is within the
        method's tolerance).
        """
        import pandas as pd

        rows = [
            {
                "method": step.compression.label, "step_s": step.step_s, "compute_s": step.compute_s,
                "codec_s": step.codec_s, "communication_s": step.communication_s,
                "sent_bytes": step.sent_bytes, "speed": self.speedup(step), "loss": self._loss(step),
                "is_harmless": is_within_tolerance(step.compression, self.optimizer),
            }
            for step in sorted(self.steps, key=lambda step: step.step_s)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def _shown(self) -> list[Part]:
        rows = [
            [
                step.compression.label,
                duration_text(step.step_s),
                f"{self.speedup(step):.3g} ×",
                bytes_text(step.sent_bytes),
            ]
            for step in sorted(self.steps, key=lambda step: step.step_s)
        ]
        table = Table(["method", "step", "speed-up", "sent by the busiest rank"], rows)
        return [Sentences([self.verdict], is_titled=False), table]


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

    The step is that of `ss.predict`, with the time for packing and unpacking measured on this machine, which takes a
    few seconds.

    Args:
        job: A job with the strategy ``ring`` or ``all-reduce``. Its own compression is ignored.
        methods: One or several methods, given by name or with their settings.
        link: The emulated link of each rank, or its name in the catalogue; None to use the job's link or, if it has
            none, the machine's own link.
        probe: A finished, uncompressed run of the same job on any link. The difference between its measured and
            predicted step time is then added to the compute time of all steps; None to rely on the constants of
            `ss.calibrate`.

    Raises:
        SpecError: The job's strategy is neither ``ring`` nor ``all-reduce``, the job has only one rank, or a method is
            incompatible with the job or differs between steps. Also if the probe is a run of a different job or has no
            finished steps, or if the ranks compute on GPUs, whose step time is not predicted.
    """
    if not _in_a_ring(job.strategy) or job.world_size == 1:
        rings = strategies_where(_in_a_ring)
        raise SpecError(
            f"the effect of compression cannot be predicted for strategy={job.strategy.name!r} with "
            f"world_size={job.world_size}; use strategy={' or '.join(map(repr, rings))} and world_size=2 or more"
        )
    compressions = [Compression("none"), *methods_of(methods)]
    for compression in compressions:
        refuse_unsteady(compression)
    linked = job if link is None else job.replace(link=link)
    jobs = [linked.replace(compression=compression) for compression in compressions]
    plain = predict_job(jobs[0])
    found = [predict_job(one, trace=lambda _: plain.found) for one in jobs]
    more_s = 0.0 if probe is None else _slower_s(jobs[0], probe, plain)
    steps = tuple(_step(prediction, more_s) for prediction in found)
    own_rate = predict_job(jobs[0].replace(link=None), trace=lambda _: plain.found).rates.link
    where = f"the machine's own link ({8 * own_rate / 1e9:.3g} Gbit/s)"
    if linked.link is not None:
        where = f"a link of {linked.link.label}"
    return Worth(where, steps, linked.link, job.optimizer.name, own_rate)


def _step(found: JobPrediction, more_s: float) -> PredictedStep:
    """Return a predicted step, whose computation takes `more_s` longer than predicted."""
    if found.time is None or found.host is None:
        raise SpecError(
            "the job's ranks compute on GPUs of this machine, whose step time is not predicted; describe them as a "
            "cluster, and compare ss.predict(job.replace(compression=...), ss.Cluster.of('h100', per_node="
            f"{found.job.world_size})) with and without compression"
        )
    strategy = found.job.strategy
    assert isinstance(strategy, BucketedStrategy)
    parts = {part.name: part.value for part in found.time.parts}
    communication_s, _ = parts.pop("communication", 0.0), parts.pop("codec", 0.0)
    slow = shared_slowdown(found.host, active_ranks(strategy.work(found.step)), usable_cores())
    codec_s = slow * codec_seconds(found.job, found.step.buckets(strategy.bucket_mb))
    compute_s = max(0.0, sum(parts.values()) + more_s)
    return PredictedStep(
        found.job.compression, float(found.sent_bytes.max()), compute_s, codec_s, communication_s
    )


def _slower_s(job: Job, probe: Run, plain: JobPrediction) -> float:
    """Return how much longer a step of a probe took than it is predicted to take, in seconds."""
    asked = job.model_dump(mode="json")
    for field, value in probe.job.model_dump(mode="json").items():
        if field not in _OPEN and value != asked[field]:
            raise SpecError(
                f"probe={probe.id!r} ran with {field}={getattr(probe.job, field)!r}, but the uncompressed job has "
                f"{getattr(job, field)!r}; pass an uncompressed run of the same job, or omit probe"
            )
    measured_s = probe.summary().step_time_s
    predicted_s = predict_job(probe.job, probe.cluster, trace=lambda _: plain.found).step_time_s
    if measured_s is None or predicted_s is None:
        raise SpecError(
            f"probe={probe.id!r} has no finished step; wait for it with probe.wait(), or omit probe"
        )
    return measured_s - predicted_s
