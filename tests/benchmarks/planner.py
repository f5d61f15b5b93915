"""The planner on one core (NumPy's loops are serial): layouts scored a second, whole spaces, a slider.

Beside it a plain Python loop that asks the same formulas for one layout at a time.
"""

from __future__ import annotations

import numpy as np
from _report import compare

from shardscope.analytic.planner import Space, plan
from shardscope.analytic.planner.candidates import candidates
from shardscope.analytic.planner.rank import ranking, scores
from shardscope.analytic.planner.search import Setting, capacity, memory_of, search, time_of
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.model import Model

BATCH, SCORED, LOOPED, CHUNK = 3072, 1 << 20, 200, 1 << 16


def trillion() -> Setting:
    """1 T parameters (Narayanan et al. 2021, table 1) on 2,048 nodes of eight A100s."""
    model = Model.transformer(name="megatron-1t", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048)
    cluster = Cluster.of("a100-80gb", nodes=2048, per_node=8)
    return Setting(model, cluster, Calibration.of(cluster.device))


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
        memory[part] = memory_of(setting, layouts)[0]
        time[part] = time_of(setting, layouts).total
    return ranking(scores({"time": 1.0}, time, memory, capacity_bytes=capacity(setting)), time, memory)


def main() -> None:
    setting = trillion()
    found = candidates(setting.model, setting.cluster, global_batch=BATCH, space=Space())
    body, way = rows(found, SCORED)
    few = body[:LOOPED], way[:LOOPED]
    every = found.ways[found.bodies.grid].nonzero()
    middle = slice(len(every[0]) // 2, len(every[0]) // 2 + SCORED)
    scored = compare(
        {
            f"{SCORED:,} neighbours scored and ranked": lambda: score(
                setting, found, every[0][middle], every[1][middle]
            ),
            f"{SCORED:,} at random scored and ranked": lambda: score(setting, found, body, way),
            f"{LOOPED} in a plain loop": lambda: [
                score(setting, found, few[0][at : at + 1], few[1][at : at + 1]) for at in range(LOOPED)
            ],
        },
        rounds=5, warm_up=1, baseline=f"{LOOPED} in a plain loop",
    )  # fmt: skip
    fast, slow = (timing.median_ms / 1e3 for timing in scored.values())
    print(
        f"{SCORED / fast:,.0f} layouts a second, {SCORED / fast / (LOOPED / slow):,.0f} times the plain loop"
    )

    packed = Space().fixed({"compression": ["none", "fp16", "int8", "int4", "topk-1%", "powersgd-4"]})

    def whole(space):
        here = candidates(setting.model, setting.cluster, global_batch=BATCH, space=space)
        return here, search(setting, here, keep=20)

    plans = plan(setting.model, setting.cluster, global_batch=BATCH)
    print(
        f"\nthe whole space: {whole(Space())[0].num_valid:,} layouts, with compression {whole(packed)[0].num_valid:,}"
    )
    compare(
        {
            "1 T parameters on 16,384 devices, all ranked": lambda: whole(Space()),
            "the same with every compression": lambda: whole(packed),
            "ranked anew by other weights": lambda: plans.by({"time": 1, "headroom": 0.3}).best,
            "two plans explained": lambda: plans.explain(1, 2).sentences,
        },
        rounds=7, warm_up=1, baseline="1 T parameters on 16,384 devices, all ranked",
    )  # fmt: skip


if __name__ == "__main__":
    main()
