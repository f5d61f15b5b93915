"""How long a step waits for training data that comes from an emulated slow source."""

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
from shardscope.storage.parts import hold_out, whole_parts

WAITING = "waiting for the source"
_SEQ = 64
"""Tokens per row of a model without a sequence length, as in `load_data`."""


class Stored(NamedTuple):
    """Training rows of shards.

    Attributes:
        rows: Number of rows.
        num_bytes: Size of all shards.
        row_bytes: Mean size of a row in its shard.
        shard_rows: Mean number of rows of a shard.
    """

    rows: int
    num_bytes: int
    row_bytes: float
    shard_rows: float


def with_waiting(parts: tuple[Term, ...], step: JobStep) -> tuple[Term, ...]:
    """Return the parts of a step, with the time that a rank waits for an emulated source added to ``data``.

    Batches are read ahead while the rank computes, so a rank waits only for the time by which reading one takes longer
    than all else in a step.
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


def _waiting(step: JobStep, others_s: float) -> Term | None:
    """Return the time that a rank waits for data; None if nothing is emulated, or the cache holds all shards by then.

    Without a cache, a rank reads its own rows. With one, the ranks of a machine share the work of fetching each shard
    once, so that each reads as many bytes; latency is then that of a shard.
    """
    data = step.job.data
    if not isinstance(data, Shards) or data.slow is None:
        return None
    stored = _stored(data, _seq(step), _written_at(data))
    steps_per_epoch = max(1, stored.rows // step.job.batch.global_batch)
    if data.cache is not None and data.cache >= stored.num_bytes and step.number > steps_per_epoch:
        return None
    rows = step.samples * step.micro_batches
    num_bytes = rows * stored.row_bytes
    requests = 1.0 if data.cache is None else rows / stored.shard_rows
    reading_s = num_bytes / data.slow.bandwidth + requests * data.slow.latency_s
    inputs = {"bytes": num_bytes, "bandwidth": data.slow.bandwidth, "requests": requests,
              "latency": data.slow.latency_s, "others": others_s}  # fmt: skip
    return Term(
        WAITING, max(0.0, reading_s - others_s), "s",
        "max(0, bytes / bandwidth + requests × latency - others)", inputs, "emulated source; read ahead",
    )  # fmt: skip


def _seq(step: JobStep) -> int:
    model = step.job.model
    config = None if isinstance(model, UserCode) else model_config(model)
    return config.seq if isinstance(config, GPTConfig) else _SEQ


def _written_at(data: Shards) -> int:
    return Path(data.path).expanduser().stat().st_mtime_ns


@lru_cache(maxsize=16)
def _stored(data: Shards, seq: int, _written: int) -> Stored:
    shards = open_shards(data)
    whole = whole_parts(shards, seq)
    train = whole if data.test is not None else hold_out(whole)[0]
    rows, num_bytes = sum(part.num_rows for part in whole), sum(each.num_bytes for each in shards.shards)
    return Stored(
        sum(part.num_rows for part in train), num_bytes, num_bytes / max(1, rows), rows / len(shards.shards)
    )
