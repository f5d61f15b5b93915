"""Launch, watch, stop and find runs. This package does not import torch; only the processes that it starts do."""

from shardscope.runlog.summary import Summary
from shardscope.runlog.tail import Tail
from shardscope.runtime.driver import launch, shut_down, warm_up
from shardscope.runtime.listing import Runs, runs
from shardscope.runtime.load_job import load_job
from shardscope.runtime.run import Run

__all__ = ["Run", "Runs", "Summary", "Tail", "launch", "load_job", "runs", "shut_down", "warm_up"]
