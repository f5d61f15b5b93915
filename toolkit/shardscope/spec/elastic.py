"""Elastic jobs: the numbers of ranks that a run may have while it trains, and the job on each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors
from shardscope.spec.job_parts import Batch
from shardscope.spec.numbers import CountOrZero
from shardscope.spec.shares import samples_by_speed

if TYPE_CHECKING:
    from shardscope.spec.job import Job

_MOST_NAMED = 12
"""Maximum number of world sizes that a message lists."""


class Elastic(Spec):
    """Minimum and maximum number of ranks that a run may have while it trains; ``"2:8"`` stands for
    ``Elastic(least=2, most=8)``.

    Ranks join and leave between two steps (`Run.resize`). Each time, the ranks save a checkpoint and exit, and the
    requested number of new ranks load it and continue with the next step, in the same run. With
    `Recovery.replica_every`, the state passes through the host's memory instead if it fits there, and is written to
    disk only if the run ends before its last step. If the run's agent or the machine dies, only checkpoints on disk
    remain; set `Checkpoint.every` to save some. `Run.reduced().resizes` records whether a resize used memory or disk.

    The data order does not depend on the number of ranks: no sample is repeated within an epoch. If the number of
    samples is not a multiple of the batch size, the remaining samples are skipped, different ones in each epoch. ZeRO
    shards and pipeline stages are repartitioned.

    A batch that cannot be divided evenly is divided as evenly as possible, with weighted gradients. Gossip and
    asynchronous servers need an even division, such as a batch of 48 for 2, 3 and 4 ranks. With recovery, a run that
    loses a rank continues with fewer ranks, depending on `spares`. `Run.metrics` has the number of ranks of each step;
    averages, comparisons and per-rank metrics cover the steps since the last resize.
    """

    least: int = Field(default=2, ge=1, le=1024)
    """Smallest number of ranks, 1 to 1024."""
    most: int = Field(default=8, ge=1, le=1024)
    """Largest number of ranks, `least` to 1024."""
    batch: Literal["kept", "scaled"] = "kept"
    """Whether the global batch is ``kept``, so that only the time per step changes, or ``scaled`` with the number of
    ranks, and the learning rate with it, by the optimizer's rule (`Optimizer.scaling`)."""
    spares: CountOrZero = 0
    """With recovery: number of lost ranks to replace; each further loss shrinks the run by one rank, or to the next
    smaller number of ranks on which it can train. 0 replaces none."""

    @model_validator(mode="after")
    def _check_order(self) -> Elastic:
        if self.least > self.most:
            raise SpecError(
                f"elastic.least={self.least} is more than elastic.most={self.most}; give least <= most"
            )
        return self

    def _in_signature(self) -> str:
        return f"Elastic({self.least}, {self.most})"

    def check(self, job: Job) -> None:
        """Reject a job that starts outside the range, or that could never have another number of ranks.

        Raises:
            SpecError: The message states the field, its value and a remedy.
        """
        size = job.world_size
        if not self.least <= size <= self.most:
            raise SpecError(
                f"world_size={size} is outside elastic={self.label!r}; start with {self.least} to {self.most} ranks"
            )
        if self.spares and job.recovery is None:
            raise SpecError(
                f"elastic.spares={self.spares} has no effect without recovery; set for example recovery=3, or leave "
                "spares out"
            )
        if job.record.noise_scale:
            raise SpecError(
                f"record.noise_scale=True cannot be combined with elastic={self.label!r}, because it compares batches "
                "whose sizes depend on the number of ranks; use one of the two"
            )
        if next((other for other in sizes(job) if other != size), None) is None:
            raise SpecError(
                f"elastic={self.label!r} has no effect: {_why_not(job, size + 1 if size < self.most else size - 1)}"
            )

    @property
    def label(self) -> str:
        """The range in the form of torchrun's ``--nnodes``, such as ``2:8``."""
        return f"{self.least}:{self.most}"


def elastic_from(value: Any) -> Any:
    """Convert the text ``"2:8"`` or the pair ``(2, 8)`` to a range of ranks; return any other valid value unchanged.

    Raises:
        SpecError: The value is not a range.
    """
    if value is None or isinstance(value, Elastic | dict):
        return value
    if isinstance(value, list | tuple) and [type(each) for each in value] == [int, int]:
        return Elastic(least=value[0], most=value[1])
    found = re.fullmatch(r"\s*(\d{1,4})\s*:\s*(\d{1,4})\s*", value) if isinstance(value, str) else None
    if found is None:
        raise SpecError(
            f"elastic={quoted(value)} is not a range of ranks; give least and most, such as '2:8', or ss.Elastic(...)"
        )
    return Elastic(least=int(found[1]), most=int(found[2]))


ElasticOrRange = Annotated[Elastic, BeforeValidator(elastic_from)]
"""A field that accepts a range of ranks, its short string such as ``"2:8"``, or the pair ``(2, 8)``."""


def sizes(job: Job) -> Iterator[int]:
    """Yield the numbers of ranks on which an elastic job can train, in ascending order.

    Example:
        >>> from shardscope.spec import Job
        >>> [*sizes(Job(model="mlp", data="digits", strategy="gossip", world_size=2, batch=64, elastic="2:6"))]
        [2, 4]
    """
    assert job.elastic is not None
    for size in range(job.elastic.least, job.elastic.most + 1):
        if size == job.world_size or isinstance(_at(job, size), type(job)):
            yield size


def next_smaller(job: Job, world_size: int) -> int:
    """Return the largest number of ranks below `world_size` on which an elastic job can train; else `world_size`.

    Example:
        >>> from shardscope.spec import Job
        >>> next_smaller(Job(model="mlp", data="digits", world_size=2, batch=64, elastic="2:4"), 4)
        3
    """
    return max((size for size in sizes(job) if size < world_size), default=world_size)


def at_size(job: Job, world_size: int) -> Job:
    """Return an elastic job, given as it was launched, with the settings for another number of ranks.

    The global batch is kept or scaled, depending on `Elastic.batch`. If it cannot be divided evenly, some ranks get one
    micro-batch more than other ranks (or one sample, without micro-batches). The micro-batch size is kept if it divides
    a rank's share; otherwise, it becomes the largest smaller divisor of the share.

    Raises:
        SpecError: The job cannot train on this number of ranks; the message lists those on which it can.
    """
    elastic = job.elastic
    if world_size == job.world_size:
        return job
    if elastic is None:
        raise SpecError(
            f"the job has a fixed world_size={job.world_size}; to change it while it trains, start the job with "
            f"elastic=ss.Elastic(least=..., most=...), in a shell with --elastic {min(job.world_size, 2)}:8"
        )
    made = _at(job, world_size) if elastic.least <= world_size <= elastic.most else None
    if isinstance(made, SpecError) or made is None:
        works = [*sizes(job)]
        named = ", ".join(map(str, works[:_MOST_NAMED])) + (", ..." if len(works) > _MOST_NAMED else "")
        why = made or f"world_size={world_size} is outside elastic={elastic.label!r}"
        raise SpecError(f"{why}; this elastic job can train on {named} ranks")
    return made


def _at(job: Job, world_size: int) -> Job | SpecError:
    """Return the job on this number of ranks, or the reason why it cannot train on them."""
    refused: SpecError | None = None
    try:
        for batch in _batches(job, world_size):
            try:
                return _with(job, world_size, batch)
            except SpecError as error:
                refused = refused or error
    except SpecError as error:
        return error
    assert refused is not None
    return refused


def _with(job: Job, world_size: int, batch: Batch) -> Job:
    growth = batch.global_batch / job.batch.global_batch
    made = job.replace(
        world_size=world_size, batch=batch, optimizer=job.optimizer.scaled(growth), elastic=None
    )
    return made.model_copy(
        update={"elastic": job.elastic}
    )  # checked already, on the job's own number of ranks


def _why_not(job: Job, world_size: int) -> str:
    assert job.elastic is not None
    if job.elastic.least == job.elastic.most:
        return f"least and most are both {job.elastic.least}"
    found = _at(job, world_size)
    return str(found) if isinstance(found, SpecError) else ""


def _batches(job: Job, world_size: int) -> Iterator[Batch]:
    """Yield the possible `Batch` settings for another number of ranks, the best first.

    A batch that cannot be divided evenly is divided as evenly as possible if the strategy can weight gradients. If the
    strategy suggests a micro-batch size, the batch is also yielded with that size.
    """
    assert job.elastic is not None
    batch, ranks, before = job.batch, job.strategy.num_data_ranks(world_size), job.num_data_ranks
    if job.elastic.batch == "scaled":
        batch = batch.replace(global_batch=batch.per_rank(before) * ranks)
    among = None if ranks == world_size else f"the {ranks} workers of world_size={world_size}"
    num_units, unit = batch.global_batch // (batch.micro_batch or 1), batch.micro_batch or 1
    if batch.global_batch % ranks and batch.shares is None and num_units >= ranks:
        yield batch.replace(shares=samples_by_speed(batch.global_batch, [1.0] * ranks, unit))
    share, micro = batch.per_rank(ranks, among=among), batch.micro_batch
    if micro is not None and share % micro:
        micro = max(divisors(share, largest=min(micro, share)))
    yield batch.replace(micro_batch=micro)
    suggested = job.strategy.suggested_micro_batch(batch.global_batch, world_size)
    if suggested is not None:
        yield batch.replace(micro_batch=suggested)
