"""Launch, watch, stop and find runs. Does not import torch; only the processes it starts do."""

from shardscope.runtime.driver import launch, shut_down, warm_up
from shardscope.runtime.listing import Runs, runs
from shardscope.runtime.load_job import load_job
from shardscope.runtime.run import Run
from shardscope.runtime.summary import Summary
from shardscope.runtime.tail import Tail

__all__ = ["Run", "Runs", "Summary", "Tail", "launch", "load_job", "runs", "shut_down", "warm_up"]
