"""Below which bandwidth each method of compression pays for a job's own model, by number of workers.

Bytes come from the formulas, packing and unpacking from this machine: each method's code is run on gradients of the
model's shapes. Every worker is taken to have a machine of its own, as fast as this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardscope.analytic.communication.worth import Exchange, exchange_of, exchange_time, level_bandwidth
from shardscope.errors import SpecError
from shardscope.measure.codecs import codec_seconds
from shardscope.spec import Compression, Job
from shardscope.spec.user_code import label_of

if TYPE_CHECKING:
    import pandas as pd

USUAL = tuple(
    Compression(name=name)
    for name in ("bf16", "int8", "int4", "qsgd", "sign", "topk", "randomblock", "powersgd")
)
"""Methods that are looked at unless others are named: one of each kind."""
UNSTEADY = ("onebit-adam", "onebit-lamb", "local-sgd")
WORKERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class MethodWorth:
    """One method, by number of workers.

    Attributes:
        compression: The method.
        exchanges: A step's exchange for each number of workers.
        bandwidths: In bytes a second, for each: the link below which the method is quicker than sending gradients as
            they are; 0 where none is slow enough, infinite where any is.
    """

    compression: Compression
    exchanges: tuple[Exchange, ...]
    bandwidths: tuple[float, ...]


@dataclass(frozen=True)
class BreakEven:
    """What each method is worth for one model.

    Attributes:
        label: Of the model.
        num_params: Elements of its gradient.
        workers: Numbers of workers.
        latency_s: Of a message, as asked.
        plain: The uncompressed exchange for each number of workers.
        methods: One row a method.
    """

    label: str
    num_params: int
    workers: tuple[int, ...]
    latency_s: float
    plain: tuple[Exchange, ...]
    methods: tuple[MethodWorth, ...]

    def best(self, workers: int, bandwidth: float) -> tuple[Compression, float]:
        """The quickest way on a link of so many bytes a second, and by how many times it beats sending as it is.

        Raises:
            SpecError: This number of workers was not looked at.
        """
        if workers not in self.workers:
            raise SpecError(
                f"workers={workers} was not looked at; take one of {', '.join(map(str, self.workers))}"
            )
        column = self.workers.index(workers)
        plain = float(exchange_time(self.plain[column], bandwidth, self.latency_s))
        times = [
            (float(exchange_time(method.exchanges[column], bandwidth, self.latency_s)), method.compression)
            for method in self.methods
        ]
        seconds, quickest = min(times, key=lambda pair: pair[0])
        return (quickest, plain / seconds) if seconds < plain else (Compression(), 1.0)

    def to_frame(self) -> pd.DataFrame:
        """A row a method and number of workers: bytes sent, codec seconds, break-even in bit/s."""
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
    methods: Sequence[Compression | str] = USUAL,
    workers: Sequence[int] = WORKERS,
    latency_s: float = 0.0,
    repeats: int = 3,
) -> BreakEven:
    """Look at each method for the model of `job`. Takes some seconds, most of them packing.

    Args:
        job: Its model, optimizer, seed and threads are used.
        methods: Names, or methods with their settings.
        workers: Numbers of workers, each 2 or more.
        latency_s: Seconds a message takes on the link.
        repeats: Steps that are timed for each.

    Raises:
        SpecError: A number of workers is below 2, or a method is not known or does not go with the job.
    """
    if min(workers) < 2:
        raise SpecError(f"workers={min(workers)} exchange nothing; take 2 or more")
    shapes = gradient_shapes(job)
    plain = tuple(exchange_of(Compression(), shapes, count) for count in workers)
    worths = []
    for method in methods:
        compression = Compression(name=method) if isinstance(method, str) else method
        refuse_unsteady(compression)
        own = job.replace(strategy="ring", world_size=2, compression=compression)
        exchanges = [
            exchange_of(
                compression,
                shapes,
                count,
                codec_s=codec_seconds(own, shapes, world_size=count, repeats=repeats),
            )
            for count in workers
        ]
        levels = [level_bandwidth(a, b, latency_s) for a, b in zip(plain, exchanges, strict=True)]
        worths.append(MethodWorth(compression, tuple(exchanges), tuple(map(float, levels))))
    num_params = sum(int(np.prod(shape)) for shape in shapes)
    return BreakEven(label_of(job.model), num_params, tuple(workers), latency_s, plain, tuple(worths))


def refuse_unsteady(compression: Compression) -> None:
    """Refuse methods whose exchange changes from step to step: no step of theirs stands for all.

    Raises:
        SpecError: It is one of them.
    """
    if compression.name in UNSTEADY:
        raise SpecError(
            f"compression={compression.name!r} exchanges different things at different steps, so no one step can be "
            f"predicted; take for example {', '.join(method.name for method in USUAL)}"
        )


def gradient_shapes(job: Job) -> list[tuple[int, ...]]:
    """Shapes of the trained parameters of a job's model, in their order."""
    import torch

    from shardscope.training.models import build_model
    from shardscope.training.trainer import resolve

    state = torch.get_rng_state()
    model = build_model(resolve(job.model), dtype=torch.float32)
    torch.set_rng_state(state)
    return [tuple(p.shape) for p in model.parameters() if p.requires_grad]
