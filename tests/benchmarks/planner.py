"""The planner on one core (NumPy's loops are serial): layouts scored a second, whole spaces, a slider.

Beside it a plain Python loop over the same formulas (`_plain`), which is checked to give the same numbers first. With
``--cpu``, seconds are those for which this process had a core: on a busy machine the wall clock measures its others.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from _plain import Plain, rows_of
from _report import compare

from shardscope.calibration.calibration import Calibration
from shardscope.planner import SearchAxes, plan
from shardscope.planner.candidates import candidates
from shardscope.planner.rank import ranking, scores
from shardscope.planner.search import search
from shardscope.planner.setting import SearchSettings, capacity, memory_parts, time_of
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Model

BATCH, SCORED, LOOPED, CHUNK = 3072, 1 << 20, 4000, 1 << 16
CLOCK = time.process_time if "--cpu" in sys.argv else time.perf_counter


def trillion() -> SearchSettings:
    """1 T parameters (Narayanan et al. 2021, table 1) on 2,048 nodes of eight A100s."""
    model = Model.transformer(name="megatron-1t", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048)
    cluster = Cluster.of("a100-80gb", nodes=2048, per_node=8)
    return SearchSettings(model, cluster, Calibration.of(cluster.device).replace(software="megatron-core"))


def rows(found, count, seed=0):
    """Places of so many different candidates, drawn at random."""
    rng = np.random.default_rng(seed)
    body = rng.integers(0, len(found.bodies.grid), 4 * count)
    way = rng.integers(0, found.ways.shape[1], 4 * count)
    real = np.flatnonzero(found.ways[found.bodies.grid[body], way])[:count]
    return body[real], way[real]


def score(setting, found, body, way):
    """Memory, time and rank of the rows, a chunk at a time."""
    time, memory = np.empty(len(body)), np.empty(len(body))
    for start in range(0, len(body), CHUNK):
        part = slice(start, start + CHUNK)
        layouts = found.layouts(body[part], way[part], np.zeros(len(body[part]), np.int64))
        held = memory_parts(setting, layouts)
        memory[part] = held.total
        time[part] = time_of(setting, layouts, held.drive_share).total
    return ranking(scores({"time": 1.0}, time, memory, capacity_bytes=capacity(setting)), time, memory)


def looped(plain, table):
    """Time and memory of each row, and the rows in order: the same by a plain loop over scalars."""
    found = []
    for row in table:
        memory, share = plain.memory(row)
        found.append((plain.time(row, share), memory))
    return found, sorted(range(len(found)), key=found.__getitem__)


def check(setting, layouts, plain, table):
    """Hold the plain loop to the planner's own numbers."""
    held = memory_parts(setting, layouts)
    times, sizes = zip(*looped(plain, table)[0], strict=True)
    np.testing.assert_allclose(sizes, held.total, rtol=1e-12)
    np.testing.assert_allclose(times, time_of(setting, layouts, held.drive_share).total, rtol=1e-12)
    print(f"the plain loop gives the planner's times and bytes of {len(table):,} layouts\n")


def main() -> None:
    setting = trillion()
    found = candidates(setting.model, setting.cluster, global_batch=BATCH, space=SearchAxes())
    body, way = rows(found, SCORED)
    layouts = found.layouts(body[:LOOPED], way[:LOOPED], np.zeros(LOOPED, np.int64))
    plain, table = Plain(setting), rows_of(layouts)
    check(setting, layouts, plain, table)
    every = found.ways[found.bodies.grid].nonzero()
    middle = slice(len(every[0]) // 2, len(every[0]) // 2 + SCORED)
    beside, at_random = (f"{SCORED:,} {kind} scored and ranked" for kind in ("neighbours", "at random"))
    loop = f"{LOOPED:,} at random in a plain loop"
    scored = compare(
        {
            beside: lambda: score(setting, found, every[0][middle], every[1][middle]),
            at_random: lambda: score(setting, found, body, way),
            loop: lambda: looped(plain, table),
        },
        rounds=9, warm_up=1, baseline=loop, clock=CLOCK,
    )  # fmt: skip
    slow = LOOPED / scored[loop].median_ms * 1e3
    print(f"\nthe plain loop: {slow:,.0f} layouts a second")
    for name in (beside, at_random):
        timing = scored[name]
        print(
            f"{name}: {SCORED / timing.median_ms * 1e3:,.0f} a second, "
            f"{SCORED / LOOPED / timing.ratio:.1f} times the plain loop (of the same rounds)"
        )

    packed = SearchAxes().fixed({"compression": ["none", "fp16", "int8", "int4", "topk", "powersgd"]})

    def whole(space):
        here = candidates(setting.model, setting.cluster, global_batch=BATCH, space=space)
        return here, search(setting, here, keep=20)

    plans = plan(setting.model, setting.cluster, global_batch=BATCH)
    print(
        f"\nthe whole space: {whole(SearchAxes())[0].num_valid:,} layouts, "
        f"with compression {whole(packed)[0].num_valid:,}"
    )
    compare(
        {
            "1 T parameters on 16,384 devices, all ranked": lambda: whole(SearchAxes()),
            "the same with every compression": lambda: whole(packed),
            "ranked anew by other weights": lambda: plans.by({"time": 1, "headroom": 0.3}).best,
            "two plans explained": lambda: plans.explain(1, 2).sentences,
        },
        rounds=7, warm_up=1, baseline="1 T parameters on 16,384 devices, all ranked", clock=CLOCK,
    )  # fmt: skip


if __name__ == "__main__":
    main()
