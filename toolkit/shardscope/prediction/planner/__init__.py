"""Search every layout of a model on a cluster, rank what fits, and say why the rest lost.

`plan` goes through a `Space` of axes: `candidates` writes out what can be, `search` scores it a chunk at a time with
`analytic.memory` and `prediction.step` and keeps what can be the best by any measure, and `Plans` is the table that can
be asked: `frame`, `front`, `best`, `by`, `explain`, `why`.
"""

from shardscope.prediction.planner.explain import Difference, Explanation
from shardscope.prediction.planner.plan import plan
from shardscope.prediction.planner.plans import Plan, Plans, short
from shardscope.prediction.planner.rank import OBJECTIVES
from shardscope.prediction.planner.rules import REASONS
from shardscope.prediction.planner.space import Space

__all__ = [
    "OBJECTIVES",
    "REASONS",
    "Difference",
    "Explanation",
    "Plan",
    "Plans",
    "Space",
    "plan",
    "short",
]
