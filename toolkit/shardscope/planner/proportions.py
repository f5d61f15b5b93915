"""Notes on parts of a rehearsed step that take a different share of the step than planned."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.analytic.terms import Term
from shardscope.prediction.step.step import StepParts

_PARTS = {
    "computation": ("compute", "recompute", "overhead", "data", "forward", "backward"),
    "communication": (
        "tensor_comm", "context_comm", "expert_comm", "pipeline_comm", "data_comm", "communication", "codec",
    ),
    "the optimizer": ("optimizer", "offload"),
    "idle time": ("bubble", "idle"),
}  # fmt: skip
"""Names of the parts of a planned step and of a job's step, by category."""
_ALIKE = 0.1
"""Largest difference between shares of a step for which no note is given."""
_EXPOSED = ": jobs do not hide messages behind computation, and each message costs this machine time"


def proportion_notes(planned: StepParts, time: Term) -> Iterator[str]:
    """Yield a sentence for each part whose share of the job's step differs by more than 10 % of the step.

    Args:
        planned: Times of the planned step, one row.
        time: Predicted step time of the job.
    """
    there = {name: float(column[0]) for name, column in planned._asdict().items()}
    whole = there.pop("total")
    here = {part.name: part.value for part in time.parts}
    for part, names in _PARTS.items():
        mine = sum(here.get(name, 0.0) for name in names) / time.value
        its = sum(there.get(name, 0.0) for name in names) / whole
        if abs(mine - its) > _ALIKE:
            why = _EXPOSED if part == "communication" and mine > its else ""
            yield f"{part.capitalize()} takes {mine:.0%} of a step here and {its:.0%} in the plan{why}."
