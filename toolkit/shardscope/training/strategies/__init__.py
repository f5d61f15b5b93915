"""Base classes of parallelism strategies, which define how one rank trains together with the other ranks.

base              RankStrategy: one step from the forward pass to the update
bucketed          BucketedRank: data parallelism in the buckets of DistributedDataParallel
own_all_reduce    OwnAllReduce: a BucketedRank with an all-reduce that the subclass defines
partitioned       Partitioned: the optimizer updates only this rank's pieces of the parameters
fully_sharded     FullySharded: a Partitioned strategy with parameters sharded by FSDP2

Each strategy has its own folder in `shardscope.methods.strategies`.
"""

from __future__ import annotations

from shardscope.errors import SpecError, quoted
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.strategies.base import RankStrategy
from shardscope.training.strategies.step_result import StepResult


def build_strategy(job: Job, context: RankContext) -> RankStrategy:
    """Build the strategy of `job` for the rank of `context`.

    Raises:
        SpecError: The `build` method of a user-defined strategy did not return a `RankStrategy`.
    """
    built = job.strategy.build(job, context)
    if not isinstance(built, RankStrategy):
        raise SpecError(
            f"strategy={job.strategy.name!r}: its build method returned {quoted(built)}; return an object of a class "
            "derived from shardscope.training.strategies.RankStrategy, such as ss.OwnAllReduce"
        )
    return built


__all__ = ["RankStrategy", "StepResult", "build_strategy"]
