"""Callables timed against each other on real ranks: every rank builds its own and takes the same turns."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import shardscope as ss
from benchmarks._report import compare
from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

Calls = Mapping[str, Callable[[], object]]


def compare_on_ranks(
    cases: Mapping[str, Callable[[RankContext], Calls]], *, rounds: int, baseline: str
) -> None:
    """Print a table for each case: under its name, what rank 0 saw.

    The number of ranks is the first argument of the command line, or 2.
    """
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    pool = RankPool(world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, calls in cases.items():
                tables = pool.run(
                    lambda context, calls=calls: table(calls(context), rounds, baseline), Path(folder)
                )
                print(f"\n{name}, {world_size} ranks\n{tables[0]}", end="", flush=True)
    finally:
        pool.close()


def table(calls: Calls, rounds: int, baseline: str) -> str:
    """What `compare` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        compare(calls, rounds=rounds, baseline=baseline)
    return text.getvalue()


def by_toolkit(context: RankContext, job: ss.Job) -> Callable[[], float]:
    """The toolkit's own step, events and all."""
    trainer = Trainer(job, context, context.events.path.parent)
    steps = itertools.count(1)
    return lambda: trainer.take_step(next(steps))


def by_record(job: ss.Job, records: Mapping[str, ss.Record]) -> Callable[[RankContext], Calls]:
    """The toolkit's step of one job, under each way to record it."""
    return lambda context: {
        name: by_toolkit(context, job.replace(record=record, world_size=context.world_size))
        for name, record in records.items()
    }
