"""How long a step waits for training data that comes from an emulated slow source, and how many steps do.

A cache that holds all shards is filled in the first epoch, after which no step waits. The cache is assumed to be empty
at the start of a run.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shardscope.analytic.job_step import JobStep
from shardscope.analytic.terms import Term
from shardscope.spec.job_parts import UserCode
from shardscope.spec.models import GPTConfig, model_config
from shardscope.spec.shards import Shards
from shardscope.storage.formats import open_shards
from shardscope.storage.parts import whole_parts
from shardscope.storage.reader import cache_limit
from shardscope.storage.rows import SEQ, training_parts

WAITING = "waiting for the source"


class StoredRows(NamedTuple):
    """Training rows of shards.

    Attributes:
        rows: Number of rows.
        row_bytes: Mean size of a row in its shard.
        shard_rows: Mean number of rows of a shard.
        cache: Size limit of the cache; None if shards are read in place.
        holds_all: Whether the cache holds all shards.
    """

    rows: int
    row_bytes: float
    shard_rows: float
    cache: float | None
    holds_all: bool


def with_waiting(parts: tuple[Term, ...], step: JobStep) -> tuple[Term, ...]:
    """Return the parts of a step, with the time that a rank waits for an emulated source added to ``data``.

    Batches are prefetched while the rank computes, so a rank waits only if reading a batch takes longer than the rest
    of a step.
    """
    waiting = _waiting(step, sum(part.value for part in parts))
    if waiting is None or waiting.value == 0:
        return parts
    copies = tuple(part for part in parts if part.name == "data")
    others = tuple(part for part in parts if part.name != "data")
    renamed = tuple(
        Term("copies", part.value, part.unit, part.formula, part.inputs, part.source) for part in copies
    )
    return (Term.total("data", (*renamed, waiting)), *others)


def filling_s(step: JobStep, step_time_s: float) -> float:
    """Return the total time that a rank waits while a cache is filled in the first epoch, in seconds.

    0 if no step waits, or if `step_time_s` already includes the wait, because the cache cannot hold all shards or the
    job ends before the cache is full.

    Args:
        step: The step that stands for most steps of the job.
        step_time_s: Time of this step.
    """
    stored = _stored_slowly(step)
    if stored is None or not _is_filled(step, stored):
        return 0.0
    return _filling_steps(step, stored) * _reading(step, stored, step_time_s).value


def _waiting(step: JobStep, others_s: float) -> Term | None:
    """Return the time that a rank waits for data; None without an emulated source, or if the cache is already full."""
    stored = _stored_slowly(step)
    return None if stored is None or _is_filled(step, stored) else _reading(step, stored, others_s)


def _filling_steps(step: JobStep, stored: StoredRows) -> int:
    return max(1, stored.rows // step.job.batch.global_batch)


def _is_filled(step: JobStep, stored: StoredRows) -> bool:
    number = step.job.last_step if step.is_usual else step.number
    return stored.holds_all and number > _filling_steps(step, stored)


def _reading(step: JobStep, stored: StoredRows, others_s: float) -> Term:
    """Return how much longer reading a batch from the source takes than the rest of a step.

    Without a cache, a rank reads its own rows. With a cache, each shard is fetched once, and the ranks of a machine
    share this work equally; the latency then applies per shard.
    """
    data = step.job.data
    assert isinstance(data, Shards), "they are stored"
    assert data.slow is not None, "they are stored slowly"
    rows = step.samples * step.micro_batches
    num_bytes = rows * stored.row_bytes
    requests = 1.0 if stored.cache is None else rows / stored.shard_rows
    reading_s = num_bytes / data.slow.bandwidth + requests * data.slow.latency_s
    inputs = {"bytes": num_bytes, "bandwidth": data.slow.bandwidth, "requests": requests,
              "latency": data.slow.latency_s, "others": others_s}  # fmt: skip
    return Term(
        WAITING, max(0.0, reading_s - others_s), "s",
        "max(0, bytes / bandwidth + requests × latency - others)", inputs, "emulated source; read ahead",
    )  # fmt: skip


def _stored_slowly(step: JobStep) -> StoredRows | None:
    """Return the training rows of shards on an emulated source; None for other data."""
    data = step.job.data
    if not isinstance(data, Shards) or data.slow is None:
        return None
    return _stored(data, _seq(step), _written_at(data))


def _seq(step: JobStep) -> int:
    model = step.job.model
    config = None if isinstance(model, UserCode) else model_config(model)
    return config.seq if isinstance(config, GPTConfig) else SEQ


def _written_at(data: Shards) -> int:
    return Path(data.path).expanduser().stat().st_mtime_ns


@lru_cache(maxsize=16)
def _stored(data: Shards, seq: int, _written: int) -> StoredRows:
    shards = open_shards(data)
    whole = whole_parts(shards, seq)
    rows, num_bytes = sum(part.num_rows for part in whole), sum(each.num_bytes for each in shards.shards)
    limit, needed = cache_limit(shards, data), sum(each.unpacked_bytes for each in shards.shards)
    return StoredRows(
        training_parts(data, seq), num_bytes / max(1, rows), rows / len(shards.shards), limit,
        limit is not None and limit >= needed,
    )  # fmt: skip
