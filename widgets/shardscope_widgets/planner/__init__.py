"""The Planner: every layout of a model on a cluster, ranked live by weighted objectives."""

from shardscope_widgets.planner._planner import Planner

__all__ = ["Planner"]
