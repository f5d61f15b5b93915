"""Changes of a job that could reduce a loss of time, tried by predicting the changed jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardscope.errors import ShardscopeError, SpecError
from shardscope.measure.explain.losses import Cause
from shardscope.prediction.job import JobPrediction
from shardscope.spec import Compression, Job, registry
from shardscope.spec.divisors import divisors
from shardscope.spec.shares import MEASURED
from shardscope.spec.strategy import strategies

Change = dict[str, Any]
"""Fields of a job and their new values, as `Job.replace` takes them."""
Predictor = Callable[[Job], JobPrediction | None]
LEAST_GAIN = 1.1
"""Smallest predicted speed-up for which a change is suggested."""
_NEARLY = 0.6
"""Fraction of the largest gain that a milder change must reach to be preferred."""
_MOST_BATCH = 4
"""Largest factor by which a larger batch is suggested."""


@dataclass(frozen=True)
class Remedy:
    """A change of a job with its predicted effect.

    Attributes:
        change: Fields of the job to change, for `Job.replace`.
        job: The changed job.
        speed_up: Predicted samples per second of the changed job, relative to the job itself.
        prediction: Prediction for the changed job.
    """

    change: Change
    job: Job
    speed_up: float
    prediction: JobPrediction


def best_change(cause: Cause, job: Job, predict: Predictor, *, cores: int) -> Remedy | None:
    """Return the mildest change whose predicted gain is near the largest; None if no change is predicted to pay off.

    Args:
        cause: The cause of the loss.
        job: The job of the run.
        predict: Function that predicts a job, or returns None.
        cores: Number of CPU cores of this machine.
    """
    now = predict(job)
    if now is None or now.step_time_s is None:
        return None
    for changes in _CHANGES.get(cause, ()):
        found = list(_tried(changes(job, cores), job, now, predict))
        best = max((each.speed_up for each in found), default=1.0)
        if best >= LEAST_GAIN:
            return next(each for each in found if each.speed_up - 1 >= _NEARLY * (best - 1))
    return None


def untried_change(cause: Cause, job: Job) -> Change | None:
    """Return a change that may reduce a loss by an amount that is not predicted; None if the job accepts none."""
    for change in _UNPREDICTED.get(cause, _nothing)(job, 0):
        try:
            job.replace(**change, name=None)
        except ShardscopeError:
            continue
        return change
    return None


def _tried(changes: Iterable[Change], job: Job, now: JobPrediction, predict: Predictor) -> Iterator[Remedy]:
    """Yield the changes that the job accepts and that fit in memory, in their order, with their speed-up."""
    for change in changes:
        try:
            changed = job.replace(**change, name=None)
            then = predict(changed)
        except ShardscopeError:
            continue
        if then is not None and then.step_time_s and then.fits is not False:
            yield Remedy(change, changed, then.samples_per_s / now.samples_per_s, then)


def _larger_batches(job: Job, _cores: int) -> Iterator[Change]:
    """Yield larger global batches; a micro-batch that is the whole share of a rank grows with the batch."""
    size, factor = job.batch.global_batch, 2
    while factor <= _MOST_BATCH:
        micro = job.batch.micro_batch if job.num_micro_batches > 1 else None
        yield {"batch": job.batch.replace(global_batch=size * factor, micro_batch=micro)}
        factor *= 2


def _smaller_micro_batches(job: Job, _cores: int) -> Iterator[Change]:
    """Yield smaller micro-batches, largest first."""
    share = job.batch.per_rank(job.num_data_ranks)
    now = share // job.num_micro_batches
    yield from (
        {"batch": job.batch.replace(micro_batch=size)} for size in reversed(divisors(share)) if size < now
    )


def _larger_micro_batches(job: Job, _cores: int) -> Iterator[Change]:
    share = job.batch.per_rank(job.num_data_ranks)
    now = share // job.num_micro_batches
    yield from ({"batch": job.batch.replace(micro_batch=size)} for size in divisors(share) if size > now)


def _compressions(job: Job, _cores: int) -> Iterator[Change]:
    """Yield compression methods with their default settings, the methods that send the most bytes first."""
    if job.compression.is_on:
        return
    shape = [(1 << 16,)]
    known = []
    for method in registry.all_of(Compression):
        try:
            made = Compression.by_name(method.name)
            if made.is_on and made.period == 1 and not made.uncompressed(job.steps):
                known.append((float(np.sum(made.bucket_bytes(shape, job.world_size))), made))
        except ShardscopeError:
            continue
    yield from (
        {"compression": made} for _, made in sorted(known, key=lambda pair: (-pair[0], not pair[1].is_fixed))
    )


def _strategies(job: Job, _cores: int) -> Iterator[Change]:
    """Yield other strategies that reach the same parameters as a single process, without sharding states.

    Of a mesh, only the strategy of the data axis is another.
    """
    is_mesh = job.strategy.is_composite
    ranks = job.num_state_ranks if is_mesh else job.world_size
    for strategy in strategies().values():
        made = strategy()
        if made.differs_because is None and made.zero_stage == 0 and made.min_ranks <= ranks:
            yield {"strategy": job.strategy.replace(data=made) if is_mesh else made}


def _more_servers(job: Job, _cores: int) -> Iterator[Change]:
    """Yield the same strategy with more servers (the ranks that send most), if it has such a setting."""
    if "servers" in job.strategy.settings:
        for servers in range(job.strategy.settings["servers"] + 1, job.world_size + 1):
            try:
                yield {"strategy": job.strategy.replace(servers=servers)}
            except SpecError:
                return


def _fewer_ranks(job: Job, cores: int) -> Iterator[Change]:
    yield from ({"world_size": size} for size in range(min(cores, job.world_size - 1), 1, -1))


def _shares_by_speed(job: Job, _cores: int) -> Iterator[Change]:
    """Yield a batch divided by measured speed; it has one pass per step if the strategy exchanges gradients
    in each pass.
    """
    if job.batch.shares is None:
        micro_batch = None if job.strategy.exchanges_in_passes else job.batch.micro_batch
        yield {"batch": job.batch.replace(shares=MEASURED, micro_batch=micro_batch)}


def _other_splits(job: Job, _cores: int) -> Iterator[Change]:
    """Yield the same pipeline with its layers split by the ranks' speed, and evenly by number if no memory bound
    needs a split by time.
    """
    now = job.strategy.settings.get("split")
    is_bounded = job.strategy.settings.get("memory_bound") is not None
    yield from (
        {"strategy": job.strategy.replace(split=split)}
        for split in ("speed", *(() if is_bounded else ("even",)))
        if now not in (None, split)
    )


def _nothing(_job: Job, _cores: int) -> Iterator[Change]:
    yield from ()


_CHANGES: Mapping[Cause, tuple[Callable[[Job, int], Iterator[Change]], ...]] = {
    "pipeline bubble": (_smaller_micro_batches, _larger_batches),
    "uneven stages": (_other_splits,),
    "communication": (_compressions, _larger_batches),
    "server": (_strategies, _more_servers),
    "straggler": (_shares_by_speed,),
    "shared cores": (_fewer_ranks, _larger_batches),
    "small operations": (_larger_micro_batches, _larger_batches),
}
"""Kinds of changes by cause; a later kind is tried only if no change of an earlier kind is predicted to pay off."""
_UNPREDICTED: Mapping[Cause, Callable[[Job, int], Iterator[Change]]] = {
    "uneven stages": _other_splits,
    "straggler": _shares_by_speed,
}
"""Changes that depend on speeds as ranks measure them, so that a prediction may not know what they gain."""
