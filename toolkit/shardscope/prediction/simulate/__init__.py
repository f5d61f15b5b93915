"""Simulation of a job from its prediction alone, without running it.

`step_events` lists the events of one training step: computations, messages and memory of every rank. It assumes that
links are free of contention.
"""

from shardscope.prediction.simulate.step import MOST_RANKS, step_events, step_events_of

__all__ = ["MOST_RANKS", "step_events", "step_events_of"]
