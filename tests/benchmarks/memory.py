"""Memory of a million layouts at once, against the same rules in plain Python, one layout after the other.

Run it as ``python tests/benchmarks/memory.py [rows]``. Both take the fuller of a pipeline's first and last stage.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from shardscope.analytic.layouts import Layouts, distinct
from shardscope.analytic.memory import device_memory
from shardscope.spec.layout import Layout, schedule_names
from shardscope.spec.model import Transformer

sys.path.insert(0, str(Path(__file__).parents[1]))
from conformance.plain_memory import IN_FLIGHT, plain_stage_memory

MODEL = Transformer(layers=128, hidden=25600, heads=160, vocab=51200, seq=2048)
ROUNDS = 5
PLAIN_ROWS = 5_000


def layouts(rows: int) -> Layouts:
    """Random layouts of every kind that the plain rules know."""
    random = np.random.default_rng(0)
    power = lambda most: (1 << random.integers(0, most, rows)).astype(np.int64)
    data, context = power(8), power(3)
    schedules = [schedule_names().index(name) for name in IN_FLIGHT]
    return Layouts(
        data=data, tensor=power(4), pipeline=power(7), context=context, expert=np.ones(rows, np.int64),
        zero=random.integers(0, 4, rows), shard=data * context, micro_batch=power(3), num_micro_batches=power(8),
        virtual_stages=np.ones(rows, np.int64), schedule=np.array(schedules)[random.integers(0, len(schedules), rows)],
        recompute=random.integers(0, 3, rows), recompute_layers=np.zeros(rows, np.int64),
        offload=np.zeros(rows, np.int64), compression=np.zeros(rows, np.int64),
        sequence_parallel=random.integers(0, 2, rows), compressions=distinct([]),
        precision="bf16-mixed", optimizer=Layout().optimizer, flash_attention=True,
    )  # fmt: skip


def row(table: Layouts, index: int) -> Layout:
    """One row as a layout."""
    names = {0: "none", 1: "selective", 2: "full"}
    data, micro = int(table.data[index]), int(table.micro_batch[index])
    return Layout(
        data=data, tensor=int(table.tensor[index]), pipeline=int(table.pipeline[index]),
        context=int(table.context[index]), zero=int(table.zero[index]),  # type: ignore[arg-type]
        micro_batch=micro, global_batch=data * micro * int(table.num_micro_batches[index]),
        schedule=schedule_names()[table.schedule[index]],  # type: ignore[arg-type]
        recompute=names[int(table.recompute[index])],  # type: ignore[arg-type]
        sequence_parallel=bool(table.sequence_parallel[index]),
    )  # fmt: skip


def plain(layout: Layout) -> float:
    stages = {0, layout.pipeline - 1}
    return max(plain_stage_memory(MODEL, layout, stage) for stage in stages)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    table = layouts(rows)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        held = device_memory(MODEL, table).total
        times.append(time.perf_counter() - start)
    some = [row(table, index) for index in range(min(rows, PLAIN_ROWS))]
    start = time.perf_counter()
    expected = [plain(layout) for layout in some]
    plain_s = (time.perf_counter() - start) / len(some)
    assert np.allclose(held[: len(some)], expected, rtol=1e-12)
    each = sorted(times)[ROUNDS // 2] / rows
    print(
        f"{rows:,} layouts: {1 / each:,.0f} a second (median of {ROUNDS}); plain Python: {1 / plain_s:,.0f} a second"
    )
    print(f"{plain_s / each:.0f} times as fast as the plain loop")


if __name__ == "__main__":
    main()
