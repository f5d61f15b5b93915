"""What is asked: the job and its parts, as immutable values that go to JSON and back. Imports no torch."""

from shardscope.spec.batch import Batch
from shardscope.spec.job import Checkpoint, Job, Record
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.schedule import Schedule
from shardscope.spec.strategy import (
    STRATEGIES,
    AllReduce,
    Gossip,
    Hierarchical,
    ParameterServer,
    Pipeline,
    Ring,
    Single,
    Strategy,
    Tree,
    Zero1,
    Zero2,
    Zero3,
)
from shardscope.spec.user_code import UserCode

__all__ = [
    "STRATEGIES",
    "AllReduce",
    "Batch",
    "Checkpoint",
    "Gossip",
    "Hierarchical",
    "Job",
    "Optimizer",
    "ParameterServer",
    "Pipeline",
    "Record",
    "Ring",
    "Schedule",
    "Single",
    "Strategy",
    "Tree",
    "UserCode",
    "Zero1",
    "Zero2",
    "Zero3",
]
