"""Break-even bandwidth: the link speed below which a compression method saves time, for a model and n workers.

Gradients are divided into the job's buckets. The number of bytes comes from formulas. Packing and unpacking times are
measured on this machine, by running each method's code on gradients with the model's shapes. Each worker is assumed to
have its own machine, as fast as this one when it does nothing else.

If compressed gradients can be summed, packing and unpacking take the same time for any number of workers. Otherwise,
each worker unpacks one packet from every worker, which takes longer with more workers: it is timed for the fewest and
the most workers, and interpolated linearly in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.analytic.communication.exchange import (
    ExchangeCost,
    exchange_of,
    exchange_time,
    level_bandwidth,
)
from shardscope.errors import SpecError
from shardscope.measure.compression.arguments import (
    bandwidth_of,
    latency_of,
    methods_of,
    whole,
    workers_of,
)
from shardscope.measure.compression.loss_increase import loss_text
from shardscope.methods.strategies.ring import Ring
from shardscope.prediction.job import predict_job
from shardscope.spec import Compression, Job
from shardscope.spec.compression import Shapes
from shardscope.spec.job_parts import label_of

if TYPE_CHECKING:
    import pandas as pd

USUAL = tuple(
    Compression(name) for name in ("bf16", "int8", "int4", "qsgd", "sign", "topk", "randomblock", "powersgd")
)
"""Compression methods compared by default: at least one of each type."""
WORKERS = (2, 4, 8, 16, 32, 64)
BUSY = 1.5
"""Ratio of median to fastest packing time above which the machine is too busy for reliable times."""


@dataclass(frozen=True)
class MethodWorth:
    """Break-even bandwidths of one method, by number of workers.

    Attributes:
        compression: The method.
        exchanges: Cost of the gradient exchange in one step, for each number of workers.
        bandwidths: Break-even bandwidth in bytes per second, for each number of workers: on slower links the method is
            faster than sending uncompressed gradients. 0 if the method is never faster, infinity if it always is.
        low_bandwidths: `bandwidths` with the median packing time instead of the fastest.
        variation: Median packing time divided by the fastest, the largest over the numbers of workers.
    """

    compression: Compression
    exchanges: tuple[ExchangeCost, ...]
    bandwidths: tuple[float, ...]
    low_bandwidths: tuple[float, ...]
    variation: float = 1.0


class Best(NamedTuple):
    """The method with the fastest exchange on a link; ``none`` if no compressed exchange is faster."""

    compression: Compression
    speedup: float
    """Speed-up of the exchange alone over the uncompressed exchange."""
    loss: str
    """How much the loss increased with this method and the job's optimizer, in the runs that `loss_increase` names."""


@dataclass(frozen=True)
class BreakEven:
    """Break-even bandwidths of all methods for one model.

    Attributes:
        label: Name of the model.
        num_params: Number of elements of the model's gradient.
        workers: The worker counts that were compared.
        latency_s: Latency of one message, in seconds.
        plain: Cost of the uncompressed gradient exchange in one step, for each number of workers.
        methods: One entry per method.
        own_workers: The job's own number of workers, or the first of `workers` if they do not include it.
        optimizer: Name of the job's optimizer.
    """

    label: str
    num_params: int
    workers: tuple[int, ...]
    latency_s: float
    plain: tuple[ExchangeCost, ...]
    methods: tuple[MethodWorth, ...]
    own_workers: int
    optimizer: str

    @property
    def variation(self) -> float:
        """Largest variation of a method's packing times; above `BUSY`, other programs slowed the machine down."""
        return max(method.variation for method in self.methods)

    def best(self, workers: int, bandwidth: float | str) -> Best:
        """Return the method with the fastest exchange on a link, its speed-up, and its effect on the loss.

        A step also computes, so it gains less than its exchange: `compression_speedup` predicts the whole step.

        Args:
            workers: One of the numbers in `workers`.
            bandwidth: Bandwidth of the link, in bytes per second or as text with a unit, such as ``"1 Gbit/s"``.

        Raises:
            SpecError: The number is not in `workers`, or the bandwidth is not valid.
        """
        rate = bandwidth_of(bandwidth)
        if workers not in self.workers:
            raise SpecError(
                f"workers={workers} is not in this result; use one of {', '.join(map(str, self.workers))}"
            )
        column = self.workers.index(workers)
        plain = float(exchange_time(self.plain[column], rate, self.latency_s))
        times = [
            (float(exchange_time(method.exchanges[column], rate, self.latency_s)), method.compression)
            for method in self.methods
        ]
        seconds, quickest = min([(plain, Compression("none")), *times], key=lambda pair: pair[0])
        return Best(quickest, plain / seconds, loss_text(quickest, self.optimizer))

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per method and number of workers.

        Columns: method, workers, sent_bytes, codec_s, pays_below_bit_per_s (the break-even bandwidth).
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "method": method.compression.label, "workers": workers, "sent_bytes": exchange.sent_bytes,
                    "codec_s": exchange.codec_s, "pays_below_bit_per_s": 8 * bandwidth,
                }
                for method in self.methods
                for workers, exchange, bandwidth in zip(self.workers, method.exchanges, method.bandwidths, strict=True)
            ]
        )  # fmt: skip


def break_even(
    job: Job,
    *,
    methods: Iterable[Compression | str] | Compression | str = USUAL,
    workers: Iterable[int] | int = WORKERS,
    latency_s: float | str = 0.0,
    repeats: int = 5,
) -> BreakEven:
    """Compute the break-even bandwidth of each method for the model of `job`.

    This takes a few seconds, mostly to measure packing times.

    Args:
        job: The job. Only its model, precision, optimizer, seed, threads, bucket size and number of ranks are used; if
            its strategy has no bucket size, the default of ``ring`` is used.
        methods: One or several methods, given by name or with their settings.
        workers: One or several worker counts, each 2 or more.
        latency_s: Latency of a message on the link, in seconds or as text with a unit, such as ``"1 ms"``.
        repeats: Number of turns in which each method is timed for a few steps, at least 1.

    Raises:
        SpecError: A number is too small, or a method is unknown, incompatible with the job, or differs between steps.
    """
    compressions, counts, latency = methods_of(methods), workers_of(workers), latency_of(latency_s)
    whole("repeats", repeats, 1)
    for compression in compressions:
        refuse_unsteady(compression)
    own_mb = getattr(job.strategy, "bucket_mb", None)
    ring = Ring() if own_mb is None else Ring(bucket_mb=own_mb)
    ringed = job.replace(strategy=ring, world_size=2, batch=2, compression=Compression("none"), elastic=None)
    jobs = [ringed.replace(compression=one) for one in compressions]
    buckets = predict_job(ringed).step.buckets(ring.bucket_mb)
    plain = tuple(_exchange(ringed, buckets, count) for count in counts)
    worths = []
    for own, times in zip(jobs, _packing_lines(jobs, buckets, counts, repeats), strict=True):
        fastest, median = (
            tuple(_exchange(own, buckets, count, codec_s=s) for count, s in zip(counts, line, strict=True))
            for line in times
        )
        levels, low_levels = (
            tuple(float(level_bandwidth(a, b, latency)) for a, b in zip(plain, packed, strict=True))
            for packed in (fastest, median)
        )
        variation = max(slow / fast if fast else 1.0 for fast, slow in zip(*times, strict=True))
        worths.append(MethodWorth(own.compression, fastest, levels, low_levels, variation))
    num_params = sum(prod(shape) for shapes in buckets for shape in shapes)
    own_workers = job.world_size if job.world_size in counts else counts[0]
    return BreakEven(
        label_of(job.model),
        num_params,
        counts,
        latency,
        plain,
        tuple(worths),
        own_workers,
        job.optimizer.name,
    )


def _exchange(job: Job, buckets: Sequence[Shapes], workers: int, *, codec_s: float = 0.0) -> ExchangeCost:
    return exchange_of(job.compression, buckets, workers, codec_s=codec_s, element_bytes=job.element_bytes)


def _packing_lines(
    jobs: Sequence[Job], buckets: Sequence[Shapes], workers: Sequence[int], repeats: int
) -> list[tuple[list[float], list[float]]]:
    """Return the packing times of each job for each number of workers, in seconds: the fastest, and the median."""
    from shardscope.measure.compression.codecs import packing_times  # needs torch

    least, most = min(workers), max(workers)
    counts = [
        [least]
        if all(each.op == "sum" for each in job.compression.collectives(buckets[0], most))
        else sorted({least, most})
        for job in jobs
    ]
    timed = [(job, count) for job, own in zip(jobs, counts, strict=True) for count in own]
    found = iter(packing_times(timed, buckets, repeats=repeats))
    lines = []
    for own in counts:
        times = [next(found) for _ in own]
        fastest, median = (np.interp(workers, own, seconds).tolist() for seconds in zip(*times, strict=True))
        lines.append((fastest, median))
    return lines


def refuse_unsteady(compression: Compression) -> None:
    """Reject a method whose exchange differs between steps, since the prediction is for a single step.

    Raises:
        SpecError: The exchange differs between steps.
    """
    if not compression.is_fixed:
        raise SpecError(
            f"compression={compression.name!r} sends different data in different steps, so no single step can be "
            f"predicted; use for example {', '.join(method.name for method in USUAL)}"
        )
    if compression.at_step(1) != compression:
        raise SpecError(
            f"compression={compression.label!r} sends different data while it warms up, so no single step can be "
            "predicted; use warmup_steps=0 to predict the steps after the warm-up"
        )
