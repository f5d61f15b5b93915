"""The passes of each stage of a pipeline in a step, and which of them gather parameters that are freed between passes.

A split backward pass is a pass for inputs and, after passes of other micro-batches, a pass for weights; both recompute
a layer. The first stage has no pass for inputs. With ZeRO-3, ranks gather the parameters of a stage for each of its
passes. If the pass for weights of a micro-batch follows directly on a backward pass of the same stage, possibly of
another micro-batch, the parameters stay gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from shardscope.analytic.schedules.table import DURATIONS, ScheduledOp, ScheduleTable

PassPhase = Literal["forward", "backward", "weights"]
PHASES: tuple[PassPhase, ...] = ("forward", "backward", "weights")
PHASE_OF: dict[str, PassPhase] = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
"""By type of operation; ``weights`` is the pass for weights of a split backward pass."""


class StagePass(NamedTuple):
    """One pass of a stage in a step."""

    phase: PassPhase
    micro_batch: int
    is_split: bool = False
    """Whether it is a pass of a split backward pass, for which all parameters of the stage are gathered at once."""
    gathers: bool = True
    """Whether parameters that are freed after passes are gathered for this one."""

    @property
    def reduces(self) -> bool:
        """Whether the pass completes the gradients of weights for its micro-batch."""
        return self.phase == "weights" or (self.phase == "backward" and not self.is_split)


def pass_flops(op: str, stage: int, recomputed: float) -> float:
    """Return the FLOPs of a pass relative to the stage's forward pass.

    Args:
        op: Type of operation.
        stage: The stage.
        recomputed: FLOPs that a backward pass recomputes, relative to the forward pass.
    """
    return DURATIONS[op] + recomputed * (op in "BI" or (op == "W" and stage > 0))


def followed_by_weights(row: Sequence[ScheduledOp]) -> frozenset[ScheduledOp]:
    """Return a rank's backward passes that a pass for the weights of the same stage follows directly.

    The parameters of the stage stay gathered in between.
    """
    ran = [op for op in row if op.stage or op.op != "I"]
    return frozenset(
        op
        for op, following in pairwise(ran)
        if op.op != "F" and op.stage and following.op == "W" and following.stage == op.stage
    )


def stage_passes(table: ScheduleTable, passes: int = 1) -> list[tuple[StagePass, ...]]:
    """Return the passes of each stage in a step, in order.

    Args:
        table: Schedule of one pass of its micro-batches through all stages.
        passes: Number of passes of `table` in a step, one after the other.
    """
    found: list[list[StagePass]] = [[] for _ in range(table.num_stages)]
    count = 1 + max(op.microbatch for op in table.ops)
    for row in table.ranks:
        followed, before = followed_by_weights(row), None
        for op in row:
            if op.op == "I" and not op.stage:
                continue
            is_kept = op.op == "W" and before in followed
            is_split = op.op in "IW" and op.stage > 0
            found[op.stage].append(StagePass(PHASE_OF[op.op], op.microbatch, is_split, gathers=not is_kept))
            before = op
    return [
        tuple(
            each._replace(micro_batch=number * count + each.micro_batch)
            for number in range(passes)
            for each in one
        )
        for one in found
    ]
