"""The Planner: every layout of a model on a cluster, ranked live by what counts."""

from shardscope_widgets.planner._planner import Planner

__all__ = ["Planner"]
