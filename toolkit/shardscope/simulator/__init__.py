"""Event-level simulation of training steps: computations and messages one by one, on links that they share.

`simulate` runs a step of a job or of a layout: operations form a graph (`graph`), which an event loop (`_loop`) runs.
`of_job` and `of_layout` build the graphs, with times from the prediction; `breakdown` divides the step time into the
prediction's terms. `step_events` lists the events of a step whose times are exactly the predicted ones, without
contention.
"""

from shardscope.simulator.asynchronous import AsyncSimulation
from shardscope.simulator.entry import Failure, Simulator, simulate
from shardscope.simulator.result import Simulation
from shardscope.simulator.step import MOST_RANKS, step_events, step_events_of

__all__ = [
    "MOST_RANKS",
    "AsyncSimulation",
    "Failure",
    "Simulation",
    "Simulator",
    "simulate",
    "step_events",
    "step_events_of",
]
