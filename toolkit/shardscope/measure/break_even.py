"""Break-even bandwidth: the link speed below which each compression method pays off, for a job's model and n workers.

Gradients are divided into the job's buckets. Bytes come from formulas. Packing and unpacking times are measured on this
machine, by running each method's code on gradients of the model's shapes. Each worker is assumed to have its own
machine, as fast as this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from shardscope.analytic.communication.exchange import Exchange, exchange_of, exchange_time, level_bandwidth
from shardscope.analytic.sharding import replica_buckets
from shardscope.errors import SpecError
from shardscope.measure.arguments import bandwidth_of, latency_of, methods_of, whole, workers_of
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.spec import Compression, Job
from shardscope.spec.compression import Shapes
from shardscope.spec.strategy import Strategy
from shardscope.spec.user_code import label_of

if TYPE_CHECKING:
    import pandas as pd

USUAL = tuple(
    Compression(name) for name in ("bf16", "int8", "int4", "qsgd", "sign", "topk", "randomblock", "powersgd")
)
"""Default methods: one of each type."""
WORKERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class MethodWorth:
    """Break-even bandwidths of one method, by number of workers.

    Attributes:
        compression: The method.
        exchanges: The exchange of one step, for each number of workers.
        bandwidths: Break-even bandwidth in bytes per second, for each number of workers: on slower links the method is
            faster than sending uncompressed gradients. 0 if it is never faster, infinite if it always is.
    """

    compression: Compression
    exchanges: tuple[Exchange, ...]
    bandwidths: tuple[float, ...]


@dataclass(frozen=True)
class BreakEven:
    """Break-even bandwidths of all methods for one model.

    Attributes:
        label: Name of the model.
        num_params: Number of elements of the model's gradient.
        workers: Numbers of workers.
        latency_s: Latency of a message in seconds, as given.
        plain: The uncompressed exchange, for each number of workers.
        methods: One entry per method.
    """

    label: str
    num_params: int
    workers: tuple[int, ...]
    latency_s: float
    plain: tuple[Exchange, ...]
    methods: tuple[MethodWorth, ...]

    def best(self, workers: int, bandwidth: float | str) -> tuple[Compression, float]:
        """Return the fastest method on a link (which may be no compression) and its speed-up over no compression.

        Args:
            workers: One of the numbers in `workers`.
            bandwidth: Bandwidth of the link, in bytes per second or as text with a unit, such as ``"1 Gbit/s"``.

        Raises:
            SpecError: The number is not in `workers`, or the bandwidth is not valid.
        """
        rate = bandwidth_of(bandwidth)
        if workers not in self.workers:
            raise SpecError(
                f"workers={workers} was not computed; use one of {', '.join(map(str, self.workers))}"
            )
        column = self.workers.index(workers)
        plain = float(exchange_time(self.plain[column], rate, self.latency_s))
        times = [
            (float(exchange_time(method.exchanges[column], rate, self.latency_s)), method.compression)
            for method in self.methods
        ]
        seconds, quickest = min([(plain, Compression("none")), *times], key=lambda pair: pair[0])
        return quickest, plain / seconds

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
    repeats: int = 3,
) -> BreakEven:
    """Compute the break-even bandwidth of each method for the model of `job`. Takes a few seconds, mostly for packing.

    Args:
        job: Its model, precision, optimizer, seed, threads and bucket size are used. If its strategy has no bucket
            size, that of ``ring`` is used.
        methods: One or several methods, given by name or with their settings.
        workers: One or several numbers of workers, each 2 or more.
        latency_s: Latency of a message on the link, in seconds or as text with a unit, such as ``"1 ms"``.
        repeats: Number of steps to time for each method and number of workers, at least 1.

    Raises:
        SpecError: A number is too small, or a method is unknown or incompatible with the job.
    """
    compressions, counts, latency = methods_of(methods), workers_of(workers), latency_of(latency_s)
    whole("repeats", repeats, 1)
    for compression in compressions:
        refuse_unsteady(compression)
    ring = Strategy("ring", bucket_mb=getattr(job.strategy, "bucket_mb", None))
    ringed = job.replace(strategy=ring, world_size=2, batch=2, compression=Compression("none"))
    jobs = [ringed.replace(compression=one) for one in compressions]
    buckets = gradient_buckets(ringed)
    plain = tuple(exchange(ringed, buckets, count) for count in counts)
    worths = []
    for own in jobs:
        exchanges = tuple(_packed(own, buckets, count, repeats) for count in counts)
        levels = [level_bandwidth(a, b, latency) for a, b in zip(plain, exchanges, strict=True)]
        worths.append(MethodWorth(own.compression, exchanges, tuple(map(float, levels))))
    num_params = sum(prod(shape) for shapes in buckets for shape in shapes)
    return BreakEven(label_of(job.model), num_params, counts, latency, plain, tuple(worths))


def exchange(job: Job, buckets: Sequence[Shapes], workers: int, *, codec_s: float = 0.0) -> Exchange:
    """Return the exchange of one step of a job, with the job's gradient precision and ring directions.

    Args:
        job: The job.
        buckets: Shapes of the gradients in each bucket.
        workers: Number of workers.
        codec_s: Time of packing and unpacking in the step, in seconds.
    """
    return exchange_of(
        job.compression, buckets, workers, codec_s=codec_s, element_bytes=job.element_bytes,
        directions=getattr(job.strategy, "ring_directions", None) or 1,
    )  # fmt: skip


def _packed(job: Job, buckets: Sequence[Shapes], workers: int, repeats: int) -> Exchange:
    """Return the exchange of one step, with measured packing time."""
    from shardscope.measure.codecs import (
        codec_seconds,
    )  # imported here, since predictions without packing times do not need torch

    codec_s = codec_seconds(job, buckets, world_size=workers, repeats=repeats)
    return exchange(job, buckets, workers, codec_s=codec_s)


def refuse_unsteady(compression: Compression) -> None:
    """Reject a method whose exchange differs between steps, since no single step represents all of them.

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
            "predicted; use warmup_steps=0, which is what it sends afterwards"
        )


def gradient_shapes(job: Job) -> list[tuple[int, ...]]:
    """Return the shapes of the trained parameters of a job's model, in order."""
    import torch

    from shardscope.training.models import build_model
    from shardscope.training.trainer import resolve

    state = torch.get_rng_state()
    model = build_model(resolve(job.model), dtype=torch.float32)
    torch.set_rng_state(state)
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]


def gradient_buckets(job: Job) -> Sequence[Shapes]:
    """Return the shapes of the trained parameters by bucket, as the strategies ``ring`` and ``all-reduce`` send them.

    The job's strategy must exchange gradients in buckets.
    """
    assert isinstance(job.strategy, BucketedStrategy)
    return replica_buckets(
        gradient_shapes(job)[::-1], job.strategy.bucket_mb, element_bytes=job.element_bytes
    )
