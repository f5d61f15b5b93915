"""Predict the bytes that each rank of an observed training loop sends in one step, and the size of its model states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import between, by_backend, sent_bytes, together
from shardscope.analytic.communication.zero import times, unit_traffic
from shardscope.analytic.job_step import SETTLED, JobStep
from shardscope.analytic.memory import RankStates, spread_states
from shardscope.analytic.sharding import padded_elements
from shardscope.show import Part, Shown, Table
from shardscope.spec.model.step import ParameterRow, StepTrace
from shardscope.spec.observed import ObservedJob, ShardedUnit

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class ObservedPrediction(Shown):
    """Prediction for an observed training loop: bytes that each rank sends in one step, and bytes of its model states.

    The formulas use the model's shapes, the wrapper (such as DDP), and the number of forward passes and gradient
    exchanges in the first step. They do not use measured bytes, and leave out collectives that the script calls itself.

    Attributes:
        job: Description of the training loop, from ``run.job``.
    """

    job: ObservedJob

    @cached_property
    def traffic(self) -> Traffic | None:
        """Bytes that each rank sends in one step, by collective; None under FSDP1, and on a mesh of several axes.

        DDP does not broadcast its buffers before a forward pass that follows an evaluation, so for the broadcast only
        bounds are known.

        For DDP, each rank's value is an even share of one all-reduce over all gradients. DDP all-reduces its buckets
        one by one, so a rank may send one byte more or less for each bucket, but the total over all ranks is exact.
        """
        job = self.job
        if job.wrapper == "DDP" and job.gradient_bytes is not None:
            return times(together(self._replicated()), job.exchanges)
        if job.wrapper == "FSDP2":
            return together(self._sharded())
        return {} if job.wrapper == "none" and job.world_size == 1 else None

    def _replicated(self) -> Iterator[Traffic]:
        """Yield DDP's traffic per gradient exchange: the all-reduce of gradients, and the broadcast of buffers."""
        job = self.job
        assert job.gradient_bytes is not None
        yield by_backend("all_reduce", job.gradient_bytes, job.world_size, backend=job.backend)
        if job.broadcast_bytes:
            every = by_backend("broadcast", job.broadcast_bytes, job.world_size, backend=job.backend)
            yield between(times(every, 0), every, every)

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

        None under FSDP1, on a mesh of several axes, for optimizers other than torch's AdamW and SGD, and for models
        that mix dtypes or have parameters outside FSDP2's units. Not exact if the optimizer also updates parameters
        outside the model.
        """
        job = self.job
        is_known = job.wrapper not in ("FSDP1", "mesh") and job.optimizer.is_here and job.weight_bytes
        if not is_known or any(row.unit >= max(1, len(job.units)) for row in job.parameters):
            return None
        states = self._spread(job.parameters)
        if job.stateful is None:
            return states._replace(is_exact=False)
        updated = set(job.stateful)
        kept = [row.replace(is_trained=place in updated) for place, row in enumerate(job.parameters)]
        return states._replace(optimizer=self._spread(kept).optimizer)

    def _spread(self, rows: Sequence[ParameterRow]) -> RankStates:
        """Return the states of each rank for a model with these parameters."""
        step = self._step(rows)
        if self.job.wrapper == "FSDP2":
            return spread_states(step, 2, ranks=self._num_shards).repeated(self.job.replicas)
        return spread_states(step)

    @property
    def kinds(self) -> dict[str, Any]:
        """Peak bytes of parameters, gradients and optimizer state, with one value per rank; empty if unknown.

        Without optimizer state if several optimizers update the model, since only one of them is described.
        """
        known = ("parameters", "gradients", "optimizer")[: 2 + (self.job.num_optimizers == 1)]
        return {} if self.states is None else {kind: getattr(self.states, kind) for kind in known}

    def at_step(self, number: int) -> ObservedPrediction:  # noqa: ARG002 - same signature as for a job
        """Return this prediction, which is the same for every step."""
        return self

    def _step(self, rows: Sequence[ParameterRow]) -> JobStep:
        job = self.job
        units = tuple(map(str, range(max(1, len(job.units)))))
        trace = StepTrace(
            units=units,
            parameters=tuple(rows),
            buffer_bytes=job.buffer_bytes,
            output_bytes=0,
            moments={},
        )
        is_on_gpus = job.backend == "nccl"
        return JobStep(job, trace, SETTLED, "nccl" if is_on_gpus else "gloo", is_on_gpus)

    @property
    def sent_bytes(self) -> Any:
        """Bytes that each rank sends in one step, as an array of shape `(world_size,)`; None if unknown."""
        if self.traffic is None:
            return None
        return sent_bytes(self.traffic) + np.zeros(self.job.world_size, int)

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per rank and term. Columns: term, rank, bytes.

        A term is a collective, such as ``all_reduce``, or a type of memory, such as ``gradients``.
        """
        import pandas as pd

        columns = {name: sent.bytes for name, sent in (self.traffic or {}).items()}
        columns |= self.kinds
        rows = [
            (name, rank, int(each)) for name, column in columns.items() for rank, each in enumerate(column)
        ]
        return pd.DataFrame(rows, columns=["term", "rank", "bytes"])

    def _shown(self) -> list[Part]:
        num_params = sum(math.prod(row.shape) for row in self.job.parameters)
        title = f"{self.job.label}: {num_params:,} parameters on {self.job.world_size} ranks, by formula"
        return [Table.of_frame(self.frame(), caption=title)]
