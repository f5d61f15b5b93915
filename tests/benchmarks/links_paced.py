"""A link that is made up in user space against its formulas, and projected step times against runs on it.

python tests/benchmarks/links_paced.py [patterns | steps | fast]

patterns: every pattern at 100 Mbit/s and 1 Gbit/s, 0 and 5 ms, 2 and 4 ranks; medians of `ROUNDS`, the slowest rank's.
steps: the step time of a run on the machine's own link, longer by what the link is predicted to take, over that of the
same job on the link.
fast: a ring at rates up to 20 Gbit/s, which shows where pacing stops being precise.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from conformance.ranks import RankPool

ROUNDS = 7
STRATEGIES = ("ring", "all-reduce", "parameter-server", "zero-3")


def measure(pool: RankPool, link: ss.Link, seconds: float, only: str | None = None) -> dict[str, list[float]]:
    """Ratios of measured to formula by pattern, for a tensor that occupies the link for so many seconds."""

    def on_rank(context: Any) -> dict[str, tuple[list[tuple[float, float]], float]]:
        import torch
        import torch.distributed as dist

        from shardscope.training.collectives.paced_group import PacedGroups
        from training.collectives import test_paced as patterns

        store = dist.PrefixStore(
            f"{link.label} {seconds} {time.time() // 60}", context.group.get_group_store()
        )
        group = PacedGroups(link).make(context.group.route, context.meter, "gloo", store)
        count = int(link.bandwidth * seconds) // 96 * 24
        formulas = patterns.formulas(link, 4 * count, context.world_size)
        patterns.REPEATS = ROUNDS + 1
        with group.pacer.switched(True):
            ways = patterns.all_ways(group, torch.ones(count))
            times = {
                name: (patterns.timed(context, way), formulas[name])
                for name, way in ways.items()
                if only is None or name == only
            }
        group.pacer.close()
        return times

    ranks = pool.run(on_rank, Path(tempfile.mkdtemp()))
    return {
        name: [
            (max(end for _, end in row) - min(start for start, _ in row)) / formula
            for row in zip(*(own[name][0] for own in ranks), strict=True)
        ][1:]
        for name, (_, formula) in ranks[0].items()
    }


def show(title: str, ratios: dict[str, list[float]]) -> None:
    print(title)
    for name, values in ratios.items():
        print(
            f"  {name:34} {statistics.median(values):6.3f} x formula   (best {min(values):.3f})", flush=True
        )


def patterns() -> None:
    for world_size in (2, 4):
        pool = RankPool(world_size)
        for bandwidth in ("100 Mbit/s", "1 Gbit/s"):
            for latency in ("0 s", "5 ms"):
                link = ss.Link(bandwidth=bandwidth, latency=latency)
                show(f"{world_size} ranks, {link.label}", measure(pool, link, 0.1))
        pool.close()


def fast() -> None:
    pool = RankPool(2)
    for gigabit in (0.1, 0.3, 1, 2, 5, 10, 20):
        link = ss.Link(bandwidth=gigabit * 1e9 / 8, latency=0.0)
        show(f"2 ranks, {link.label}", measure(pool, link, 0.05, only="ring"))
    pool.close()


def make_model() -> nn.Module:
    wide = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), *wide, nn.Linear(512, 10))


def steps() -> None:
    root = tempfile.mkdtemp()
    for bandwidth in ("100 Mbit/s", "1 Gbit/s"):
        link = ss.Link(bandwidth=bandwidth, latency="1 ms")
        print(
            f"{link.label}: step time predicted from a run on the machine's own link, over the measured one"
        )
        for world_size in (2, 4):
            for strategy in STRATEGIES:
                job = ss.Job(
                    model=make_model, data="digits", strategy=strategy, world_size=world_size, steps=15
                )
                plain = ss.launch(job, root=root).wait(300)
                slowed = ss.launch(job.replace(link=link), root=root).wait(300)
                before, measured = plain.summary().step_time_s, slowed.summary().step_time_s
                assert before is not None
                assert measured is not None
                here_s, there_s = (ss.predict(each).step_time_s for each in (job, slowed.job))
                told = before + there_s - here_s
                both = f"{1e3 * told:7.1f} ms / {1e3 * measured:7.1f} ms"
                print(f"  {world_size} ranks, {strategy:18} {both} = {told / measured:.3f}", flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["patterns", "steps", "fast"]:
        {"patterns": patterns, "steps": steps, "fast": fast}[wanted]()
