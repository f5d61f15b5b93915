"""Parts of a predicted step time, in the form that the simulator needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardscope.analytic.terms import Term

_BACKWARD = {"backward", "recomputation"}
_BOTH = "embedding and output"
_BUBBLE = "pipeline bubble"
_BETWEEN_STAGES = "messages between stages"
_LAUNCHES = "launches and fixed cost"
_EXPOSED = "gradients and gathered parameters"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each part of a step; they add up to the predicted step time.

    Attributes:
        data: Reading the batch.
        forward: All forward passes of the busiest rank, with its waits for launches.
        backward: All its backward passes, with recomputation and waits for launches.
        bubble: Idle time that a pipeline schedule causes.
        codec: Packing and unpacking of compressed gradients.
        optimizer: The optimizer's update.
        communication: Collectives, by name; None if the prediction overlaps them with computation.
        exposed: Communication that is not overlapped, if it is known only as a whole.
        rest: Everything else, such as launches and the fixed cost of a step.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    bubble: float = 0.0
    codec: float = 0.0
    optimizer: float = 0.0
    communication: Mapping[str, float] | None = field(default_factory=dict)
    exposed: float = 0.0
    rest: float = 0.0

    @classmethod
    def of(cls, time: Term) -> StepTimes:
        """Return the parts of a step time: of `job_time_term`, or of `time_term` for layouts."""
        is_layout = any(part.name == "compute" for part in time.parts)
        values = {leaf.name: leaf.value for part in time.parts for leaf in _pieces(part)}
        forward, backward = values.pop("forward", 0.0), sum(values.pop(name, 0.0) for name in _BACKWARD)
        edge = values.pop(_BOTH, 0.0) / ((forward + backward) or 1.0)
        named = next((part for part in time.parts if part.name == "communication"), None)
        collectives = {} if named is None else {part.name: part.value for part in named.parts}
        launches = 1 + edge + values.pop(_LAUNCHES, 0.0) / ((forward + backward) or 1.0)
        return cls(
            data=values.pop("data", 0.0), forward=forward * launches, backward=backward * launches,
            bubble=values.pop(_BUBBLE, 0.0), codec=values.pop("codec", 0.0), optimizer=values.pop("optimizer", 0.0),
            communication=None if is_layout else collectives,
            exposed=values.pop(_BETWEEN_STAGES, 0.0) + values.pop(_EXPOSED, 0.0),
            rest=sum(value for name, value in values.items() if name != "communication"),
        )  # fmt: skip

    @property
    def total(self) -> float:
        """The step time, in seconds."""
        computing = self.data + self.forward + self.backward + self.bubble + self.codec + self.optimizer
        return computing + self.exposed + self.rest + sum((self.communication or {}).values())


def _pieces(part: Term) -> tuple[Term, ...]:
    """Return the parts of ``compute`` and ``idle``, which the simulator places separately; else the term itself."""
    return part.parts if part.name in ("compute", "idle") else (part,)
