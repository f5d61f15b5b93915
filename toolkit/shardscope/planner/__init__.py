"""Search all layouts of a model on a cluster, rank those that fit, and explain the ranking.

`plan` searches the space given by `SearchAxes`. `candidates` enumerates the valid layouts. `search` scores them in
chunks with `analytic.memory` and `prediction.step`, and keeps those that may be best by some objective. `Plans`
is the resulting table: `frame`, `front`, `best`, `by`, `explain`, `why`.
"""

from shardscope.planner.explain import Difference, PlanComparison
from shardscope.planner.plan import default_batch, known_model, plan
from shardscope.planner.plans import PlanRow, Plans
from shardscope.planner.rank import OBJECTIVES
from shardscope.planner.rules import REASONS
from shardscope.planner.space import SearchAxes
from shardscope.spec.layout import short

__all__ = [
    "OBJECTIVES",
    "REASONS",
    "Difference",
    "PlanComparison",
    "PlanRow",
    "Plans",
    "SearchAxes",
    "default_batch",
    "known_model",
    "plan",
    "short",
]
