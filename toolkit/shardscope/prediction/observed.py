"""Prediction for an observed training loop: bytes that each rank sends and holds in one step, from formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import by_backend, sent_bytes, together
from shardscope.analytic.communication.zero import times, unit_traffic
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.memory import RankStates, spread_states
from shardscope.analytic.sharding import padded_elements
from shardscope.spec.model.step import ParameterRow, StepTrace
from shardscope.spec.observed import ObservedJob, ShardedUnit

if TYPE_CHECKING:
    import pandas as pd

_SETTLED = 3
"""Number of a step by which optimizer states exist and DistributedDataParallel has its final buckets."""


@dataclass(frozen=True)
class ObservedPrediction:
    """Bytes that each rank of an observed training loop sends and holds in one step, from formulas.

    The formulas use the model's shapes, the wrapper, and the number of passes and exchanges in the first step. They do
    not use measurements, and they leave out collectives that the script calls itself.

    Attributes:
        job: Description of the training loop, from ``run.job``.
    """

    job: ObservedJob

    @cached_property
    def traffic(self) -> Traffic | None:
        """Bytes that each rank sends in one step, by collective; None under FSDP1.

        For DDP, each rank's value is an even share of one all-reduce over all gradients. DDP all-reduces its buckets
        one by one, so a rank may send one byte more or less for each bucket, but the total over all ranks is exact.
        """
        job = self.job
        if job.wrapper == "DDP":
            return times(together(self._replicated()), job.exchanges)
        if job.wrapper == "FSDP2":
            return together(self._sharded())
        return {} if job.wrapper == "none" and job.world_size == 1 else None

    def _replicated(self) -> Iterator[Traffic]:
        """Yield the traffic of one exchange: the gradients, and rank 0's buffers, broadcast before the forward pass."""
        job = self.job
        num_bytes = job.weight_bytes * sum(row.num_elements for row in job.parameters if row.is_trained)
        yield by_backend("all_reduce", num_bytes, job.world_size, backend=job.backend)
        if job.broadcast_bytes:
            yield by_backend("broadcast", job.broadcast_bytes, job.world_size, backend=job.backend)

    def _sharded(self) -> Iterator[Traffic]:
        for place, unit in enumerate(self.job.units):
            yield self._unit([row for row in self.job.parameters if row.unit == place], unit)

    def _unit(self, rows: list[ParameterRow], unit: ShardedUnit) -> Traffic:
        job, shards = self.job, self._num_shards
        whole, summed = (
            sum(padded_elements(row.shape, shards) for row in rows if row.is_trained or not trained)
            for trained in (False, True)
        )
        gathered, reduced = whole * unit.gathered_element_bytes, summed * unit.reduced_element_bytes
        return unit_traffic(
            by_backend("all_gather", gathered, shards, backend=job.backend),
            by_backend("reduce_scatter", reduced, shards, backend=job.backend) if reduced else {},
            gathers=job.forwards * unit.gathers, reductions=job.exchanges, num_shards=shards,
            replicas=job.replicas, shard_bytes=reduced // shards,
        )  # fmt: skip

    @property
    def _num_shards(self) -> int:
        return self.job.world_size // self.job.replicas

    @cached_property
    def states(self) -> RankStates | None:
        """Bytes of parameters, gradients and optimizer state on each rank.

        None under FSDP1, for optimizers other than torch's AdamW and SGD, and for models that mix dtypes or have
        parameters outside FSDP2's units.
        """
        job = self.job
        is_known = job.wrapper != "FSDP1" and job.optimizer.is_here and job.weight_bytes
        if not is_known or any(row.unit >= max(1, len(job.units)) for row in job.parameters):
            return None
        if job.wrapper == "FSDP2":
            return spread_states(self._step, 2, ranks=self._num_shards).repeated(job.replicas)
        return spread_states(self._step)

    @property
    def kinds(self) -> dict[str, Any]:
        """Peak bytes of parameters, gradients and optimizer state, as arrays of shape `(W,)`; empty if unknown."""
        known = ("parameters", "gradients", "optimizer")
        return {} if self.states is None else {kind: getattr(self.states, kind) for kind in known}

    def at_step(self, number: int) -> ObservedPrediction:  # noqa: ARG002 - same signature as for a job
        """Return this prediction, which is the same for every step."""
        return self

    @property
    def _step(self) -> JobStep:
        job = self.job
        units = tuple(map(str, range(max(1, len(job.units)))))
        trace = StepTrace(
            units=units,
            parameters=job.parameters,
            buffer_bytes=job.buffer_bytes,
            output_bytes=0,
            moments={},
        )
        return JobStep(job, trace, _SETTLED, "nccl" if job.backend == "nccl" else "gloo")

    @property
    def sent_bytes(self) -> Any:
        """Bytes that each rank sends in one step, as an array of shape `(W,)`; None if unknown."""
        if self.traffic is None:
            return None
        return sent_bytes(self.traffic) + np.zeros(self.job.world_size, int)

    def frame(self) -> pd.DataFrame:
        """Return a table with one row per rank and per collective or kind of memory: ``term``, ``rank``, ``bytes``."""
        import pandas as pd

        columns = {name: sent.bytes for name, sent in (self.traffic or {}).items()}
        columns |= self.kinds
        rows = [
            (name, rank, int(each)) for name, column in columns.items() for rank, each in enumerate(column)
        ]
        return pd.DataFrame(rows, columns=["term", "rank", "bytes"])

    def __repr__(self) -> str:
        num_params = sum(math.prod(row.shape) for row in self.job.parameters)
        title = f"{self.job.label}: {num_params:,} parameters on {self.job.world_size} ranks, by formula"
        table = self.frame()
        return title if table.empty else f"{title}\n{table.to_string(index=False)}"
