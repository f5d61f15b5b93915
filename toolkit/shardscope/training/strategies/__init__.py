"""Base classes of strategies: how one rank trains together with its peers.

base            RankStrategy, one step from the forward pass to the update
bucketed        DistributedDataParallel's buckets, and own_all_reduce, where a strategy sums them itself
partitioned     an optimizer that updates this rank's pieces only; fully_sharded, on FSDP2

Each strategy has its own folder in `shardscope.methods.strategies`.
"""

from __future__ import annotations

from shardscope.errors import SpecError, quoted
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.strategies.base import RankStrategy, StepResult


def build_strategy(job: Job, context: RankContext) -> RankStrategy:
    """Build the strategy of `job` for the rank of `context`.

    Raises:
        SpecError: A user-defined strategy built an object that is not a `RankStrategy`.
    """
    built = job.strategy.build(job, context)
    if not isinstance(built, RankStrategy):
        raise SpecError(
            f"strategy={job.strategy.name!r} built {quoted(built)}; let it build an object of a class derived from "
            "shardscope.training.strategies.RankStrategy, such as ss.OwnAllReduce"
        )
    return built


__all__ = ["RankStrategy", "StepResult", "build_strategy"]
