"""Every strategy, one file each. `build` finds the one that a job asks for."""

from __future__ import annotations

from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.strategies.all_reduce import AllReduce
from shardscope.training.strategies.base import StepResult, Strategy
from shardscope.training.strategies.gossip import Gossip
from shardscope.training.strategies.hierarchical import Hierarchical
from shardscope.training.strategies.parameter_server import ParameterServer
from shardscope.training.strategies.pipeline import Pipeline
from shardscope.training.strategies.ring import Ring
from shardscope.training.strategies.single import Single
from shardscope.training.strategies.tree import Tree
from shardscope.training.strategies.zero_1 import Zero1
from shardscope.training.strategies.zero_2 import Zero2
from shardscope.training.strategies.zero_3 import Zero3

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls
    for cls in (
        Single,
        ParameterServer,
        AllReduce,
        Tree,
        Ring,
        Hierarchical,
        Gossip,
        Pipeline,
        Zero1,
        Zero2,
        Zero3,
    )
}


def build(job: Job, context: RankContext) -> Strategy:
    """The strategy of `job` for the rank of `context`."""
    return STRATEGIES[job.strategy.kind](job, context)


__all__ = ["STRATEGIES", "StepResult", "Strategy", "build"]
