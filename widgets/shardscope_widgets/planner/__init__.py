"""The Planner: every layout of a model on a cluster, ranked by weighted objectives as the weights change."""

from shardscope_widgets.planner._planner import Planner

__all__ = ["Planner"]
