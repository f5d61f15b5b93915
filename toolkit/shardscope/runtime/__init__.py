"""Starting, watching, stopping and finding runs. Imports no torch: that lives in the processes it starts."""

from shardscope.runtime.driver import launch, shut_down, warm_up
from shardscope.runtime.run import Run, runs
from shardscope.runtime.summary import Summary
from shardscope.runtime.tail import Tail

__all__ = ["Run", "Summary", "Tail", "launch", "runs", "shut_down", "warm_up"]
