"""Pipeline stages cut by time under a memory bound, on emulated processors of unlike speed and memory. Linux only.

python tests/benchmarks/emulated_cuts.py [number of models]

Each case is a model of uneven layers, on three or four nodes of which some are slower or have less memory, so that the
fastest cut does not fit. Printed are the cut that the ranks find, its slowest stage (forward and backward pass of one
micro-batch) as counted from the layers' sizes and as measured, and the fastest slowest stage of all cuts that fit,
found by trying each. The bars: within 10 % of the count, and within 3 % of the best.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from random import Random
from statistics import median
from typing import Any, NamedTuple

import shardscope as ss

SAMPLES, MICRO_BATCHES = 8, 8
STEPS = 5
STAGE_S = 0.03
ADAM = 4
"""Copies of each parameter: weight, gradient and two moments."""


class Case(NamedTuple):
    """The widths of linear layers, which follow one that flattens; the ranks' slowness, and their memory in bytes."""

    widths: tuple[int, ...]
    slowness: tuple[float, ...]
    bounds: tuple[float, ...]

    def flops(self) -> list[int]:
        """FLOPs of each layer's forward pass of one micro-batch."""
        return [0, *(2 * SAMPLES * a * b for a, b in pairwise(self.widths))]

    def states(self) -> list[int]:
        """Bytes of each layer's parameters, gradients and moments."""
        return [0, *(4 * ADAM * (a * b + b) for a, b in pairwise(self.widths))]

    def saved(self) -> list[int]:
        """Bytes of each layer's input for one micro-batch."""
        return [4 * SAMPLES * a for a in (self.widths[0], *self.widths[:-1])]


def draw(source: Random) -> Case:
    """A case whose fastest cut does not fit."""
    while True:
        ranks = source.choice([3, 4])
        widths = (64, *(source.choice([32, 64, 128, 192, 320]) for _ in range(source.randint(7, 10))), 10)
        slowness = tuple(source.choice([1.0, 1.0, 2.0]) for _ in range(ranks))
        shares = [source.choice([1.0, 1.0, 0.5]) for _ in range(ranks)]
        case = Case(widths, slowness, tuple(shares))
        needs = sorted(overfull(case, split) for split in cuts(case))
        case = case._replace(bounds=tuple(share * needs[len(needs) // 10] for share in shares))
        if overfull(case, min(cuts(case), key=lambda split: slowest(case, split))) > 1:
            return case


def cuts(case: Case) -> Iterator[tuple[int, ...]]:
    """Every cut."""
    layers, ranks = len(case.widths), len(case.slowness)
    for ends in combinations(range(1, layers), ranks - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, layers)))


def by_stage(costs: Sequence[float], split: Sequence[int]) -> list[float]:
    """Sum the costs of each stage's layers."""
    return [sum(costs[a:b]) for a, b in pairwise([0, *accumulate(split)])]


def overfull(case: Case, split: Sequence[int]) -> float:
    """Largest ratio of a rank's need to its bound under 1F1B, whose stage s of p holds p - s micro-batches."""
    states, saved = by_stage(case.states(), split), by_stage(case.saved(), split)
    held = range(len(split), 0, -1)
    return max(
        (a + count * b) / most for a, b, count, most in zip(states, saved, held, case.bounds, strict=True)
    )


def slowest(case: Case, split: Sequence[int]) -> float:
    """Time of the slowest stage, in FLOPs of the fastest rank."""
    return max(slow * cost for slow, cost in zip(case.slowness, by_stage(case.flops(), split), strict=True))


def model_of(widths: Sequence[int]) -> Callable[[], Any]:
    """Return the model function of a case."""

    def model(widths: Sequence[int] = tuple(widths)) -> Any:
        from itertools import pairwise

        from torch import nn

        return nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in pairwise(widths)))

    return model


def measure(case: Case) -> tuple[float, float]:
    """Print a case's row; return the errors of the measured slowest stage, and of the cut against the best."""
    rate = 3 * slowest(case, min(cuts(case), key=lambda split: slowest(case, split))) / STAGE_S
    cluster = ss.Cluster.emulated(
        nodes=len(case.slowness), bandwidth="1 Gbit/s", flops=rate, memory_bandwidth="10 GB/s",
        slowdown={rank: slow for rank, slow in enumerate(case.slowness) if slow > 1},
    )  # fmt: skip
    strategy: Any = ss.Pipeline(split="speed", memory_bound=case.bounds)
    job = ss.Job(
        model=model_of(case.widths), data="digits", strategy=strategy, world_size=len(case.slowness), steps=STEPS,
        optimizer="adamw", batch=ss.Batch(global_batch=SAMPLES * MICRO_BATCHES, micro_batch=SAMPLES),
    )  # fmt: skip
    run = ss.launch(job, cluster).wait(120)
    split = tuple(run.events("pipeline_layers")[0]["split"])
    lengths: dict[tuple[str, int], list[float]] = {}
    for event in run.events("schedule"):
        if event["step"] > 2:
            for op, stage, _, start, end in event["ops"]:
                lengths.setdefault((op, stage), []).append(end - start)
    measured = max(
        sum(median(times) for (_, at), times in lengths.items() if at == stage) for stage in range(len(split))
    )
    counted = 3 * slowest(case, split) / rate
    best = 3 * min(slowest(case, each) for each in cuts(case) if overfull(case, each) <= 1) / rate
    free = 3 * min(slowest(case, each) for each in cuts(case)) / rate
    error, loss = measured / counted - 1, counted / best - 1
    print(
        f"{len(case.widths):2} layers on {len(split)} ranks as {split!s:18} slowest stage: counted "
        f"{1e3 * counted:6.1f} ms, measured {1e3 * measured:6.1f} ms ({error:+.1%}), best that fits {1e3 * best:6.1f} "
        f"ms ({loss:+.1%}), best without bound {1e3 * free:6.1f} ms, memory {overfull(case, split):.1%}",
        flush=True,
    )
    assert overfull(case, split) <= 1
    return error, loss


def main() -> None:
    """Measure the cases."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    found = [measure(draw(Random(seed))) for seed in range(count)]
    print(
        f"largest: measured {max(abs(e) for e, _ in found):.1%}, against the best {max(b for _, b in found):.1%}"
    )


if __name__ == "__main__":
    main()
