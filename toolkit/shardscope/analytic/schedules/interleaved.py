"""Interleaved pipeline schedules, with several stages per rank: interleaved 1F1B and interleaved ZB-H1.

Rank r of p holds the v stages r, r+p, r+2p and so on. Micro-batches are processed in rounds: a rank runs all
micro-batches of a round on one of its stages before it runs any of them on its next stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from shardscope.analytic.schedules.table import ScheduledOp


def interleaved(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:
    """Return one rank's order under interleaved 1F1B.

    Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, section 2.2.

    The warm-up of a rank consists of the forwards of one round on all its stages but the last, and two more forwards
    for each later rank. Then forwards and backwards alternate. A round has p micro-batches; if the number of
    micro-batches is not a multiple of p, rounds are larger, but all have the same size.
    """
    forwards, backwards, warmup = _lanes(rank, ranks, microbatches, held, hop=2)
    ops = [ScheduledOp("F", *item) for item in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        ops += [ScheduledOp("F", *forward), ScheduledOp("B", *backward)]
    return ops + [ScheduledOp("B", *item) for item in backwards[len(forwards) - warmup :]]


def zero_bubble(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:
    """Return one rank's order under interleaved ZB-H1: Qi et al., Zero bubble pipeline parallelism, 2023, section 2.3.

    Forwards alternate with input gradients only. These are therefore sent early, so one warm-up forward for each later
    rank is enough, instead of two. Each weight gradient waits until `rank` more input gradients have been computed;
    the last weight gradients fill the bubble at the end.
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
    """Return the (stage, micro-batch) pairs of all forwards and of all backwards, and the number of warm-up forwards.

    `hop` is the number of additional warm-up forwards for each rank after this one.
    """
    per_round = microbatches // max(1, microbatches // ranks)
    forwards = list(_in_rounds([rank + ranks * i for i in range(held)], microbatches, per_round))
    backwards = list(_in_rounds([rank + ranks * i for i in reversed(range(held))], microbatches, per_round))
    warmup = (held - 1) * per_round + hop * (ranks - 1 - rank)
    return forwards, backwards, min(warmup, len(forwards))


def _in_rounds(stages: list[int], microbatches: int, per_round: int) -> Iterator[tuple[int, int]]:
    for first in range(0, microbatches, per_round):
        for stage in stages:
            yield from ((stage, i) for i in range(first, first + per_round))
