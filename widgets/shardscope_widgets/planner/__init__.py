"""The Planner: ranks every layout of a model on a cluster by weighted objectives, and re-ranks when weights change."""

from shardscope_widgets.planner._planner import Planner

__all__ = ["Planner"]
