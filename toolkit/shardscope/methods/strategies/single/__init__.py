"""Training in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardscope.spec.look import MethodStyle
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job


class Single(Strategy):
    """One process without communication, which is the reference for all other strategies."""

    name = "single"
    family = "One process"
    look = MethodStyle("#8b8f99", "dot")
    min_ranks = 1
    max_ranks = 1
    zero_stage = 0

    def degrees(self, world_size: int) -> Mapping[str, Any]:
        """Return an empty mapping, which means a layout on a single device."""
        return {}

    @property
    def needs_even_because(self) -> str:
        """Why the batch cannot be divided unevenly."""
        return "one process has the whole batch"

    def traffic(self, step: JobStep) -> Traffic:
        """Return an empty mapping, since one process sends nothing."""
        return {}

    def plan(self, step: JobStep) -> StepPlan:
        """Return a plan without messages."""
        from shardscope.analytic.communication.plan import StepPlan

        return StepPlan()

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes of one whole replica: parameters, gradients and optimizer state."""
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import updates_of_whole

        return spread_states(step).with_work_buffers(step, lambda: updates_of_whole(step))

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.single._torch import SingleRank

        return SingleRank(job, context)
