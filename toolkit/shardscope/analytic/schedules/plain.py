"""One stage a rank: GPipe and 1F1B."""

from __future__ import annotations

from shardscope.analytic.schedules.table import Op


def gpipe(rank: int, ranks: int, microbatches: int, held: int) -> list[Op]:  # noqa: ARG001
    """All forwards, then all backwards (Huang et al., GPipe, 2019, figure 2c)."""
    forwards = [Op("F", rank, i) for i in range(microbatches)]
    return forwards + [Op("B", rank, i) for i in range(microbatches)]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, held: int) -> list[Op]:  # noqa: ARG001
    """As many forwards as there are stages from here to the end, then backwards and forwards by turns.

    PipeDream-Flush (Narayanan et al., Memory-efficient pipeline-parallel DNN training, 2021, section 3.2).
    """
    warmup = min(microbatches, ranks - rank)
    ops = [Op("F", rank, i) for i in range(warmup)]
    for i in range(microbatches):
        ops.append(Op("B", rank, i))
        if warmup + i < microbatches:
            ops.append(Op("F", rank, warmup + i))
    return ops
