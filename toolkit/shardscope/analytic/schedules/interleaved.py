"""Several stages per rank in a loop: interleaved 1F1B, with or without deferred weight gradients.

Rank r of p holds stages r, r+p, r+2p and so on. Micro-batches run in rounds: each stage runs all micro-batches of a
round before the next stage of the rank starts on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from shardscope.analytic.schedules.table import ScheduledOp


def interleaved(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:
    """Return one rank's order under interleaved 1F1B.

    Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, section 2.2.

    Each rank runs two more warm-up forwards per hop to the last rank, then alternates forwards and backwards. A round
    has p micro-batches, or evenly more if their number is not a multiple of p.
    """
    forwards, backwards, warmup = _lanes(rank, ranks, microbatches, held, hop=2)
    ops = [ScheduledOp("F", *item) for item in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        ops += [ScheduledOp("F", *forward), ScheduledOp("B", *backward)]
    return ops + [ScheduledOp("B", *item) for item in backwards[len(forwards) - warmup :]]


def zero_bubble(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:
    """Return one rank's order under interleaved ZB-H1: Qi et al., Zero bubble pipeline parallelism, 2023, section 2.3.

    Only the input gradient alternates with forwards, so that it is sent early and one warm-up forward per hop is
    enough. Weight gradients follow after `rank` further backwards and fill the bubble at the end.
    """
    forwards, backwards, warmup = _lanes(rank, ranks, microbatches, held, hop=1)
    weights = iter(backwards)
    ops = [ScheduledOp("F", *item) for item in forwards[:warmup]]
    later = forwards[warmup:]
    for i, backward in enumerate(backwards):
        if i < len(later):
            ops.append(ScheduledOp("F", *later[i]))
        ops.append(ScheduledOp("I", *backward))
        if i >= rank:
            ops += [ScheduledOp("W", *item) for item in islice(weights, 1)]
    return ops + [ScheduledOp("W", *item) for item in weights]


Lane = list[tuple[int, int]]


def _lanes(rank: int, ranks: int, microbatches: int, held: int, *, hop: int) -> tuple[Lane, Lane, int]:
    """Return (stage, micro-batch) of all forwards and all backwards in order, and the number of warm-up forwards."""
    per_round = microbatches // max(1, microbatches // ranks)
    forwards = list(_in_rounds([rank + ranks * i for i in range(held)], microbatches, per_round))
    backwards = list(_in_rounds([rank + ranks * i for i in reversed(range(held))], microbatches, per_round))
    warmup = (held - 1) * per_round + hop * (ranks - 1 - rank)
    return forwards, backwards, min(warmup, len(forwards))


def _in_rounds(stages: list[int], microbatches: int, per_round: int) -> Iterator[tuple[int, int]]:
    for first in range(0, microbatches, per_round):
        for stage in stages:
            yield from ((stage, i) for i in range(first, first + per_round))
