"""The pipeline schedules ZB-H1 and ZB-H2, with one stage per rank and a split backward pass.

Input gradients are computed first and sent immediately. Weight gradients are deferred, and fill the bubble.
"""

from __future__ import annotations

from shardscope.analytic.schedules.table import ScheduledOp


def zb_h1(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under ZB-H1, which needs no more memory than 1F1B.

    Qi et al., Zero bubble pipeline parallelism, 2023, section 2.1 and figure 3 (top).
    """
    return _with_weights_late(rank, microbatches, warmup=ranks - rank, late=rank)


def zb_h2(rank: int, ranks: int, microbatches: int, held: int) -> list[ScheduledOp]:  # noqa: ARG001
    """Return one rank's order under ZB-H2: Qi et al., Zero bubble pipeline parallelism, 2023, section 2.2 and figure 3.

    There are about twice as many warm-up forwards as in ZB-H1, so that no rank waits for the first gradient.
    """
    return _with_weights_late(rank, microbatches, warmup=2 * (ranks - rank) - 1, late=2 * rank)


def _with_weights_late(rank: int, microbatches: int, *, warmup: int, late: int) -> list[ScheduledOp]:
    """Return the order: `warmup` forwards, then repeatedly one input gradient, one weight gradient and one forward.

    Weight gradients run `late` micro-batches after the input gradients.
    """
    ahead = min(warmup, microbatches)
    ops = [ScheduledOp("F", rank, i) for i in range(ahead)]
    for i in range(microbatches):
        ops.append(ScheduledOp("I", rank, i))
        if i >= late:
            ops.append(ScheduledOp("W", rank, i - late))
        if ahead + i < microbatches:
            ops.append(ScheduledOp("F", rank, ahead + i))
    return ops + [ScheduledOp("W", rank, i) for i in range(max(0, microbatches - late), microbatches)]
