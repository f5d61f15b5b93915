"""What a study is about: written into its storage when it begins, and compared with what is asked when it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Job
from shardscope.spec._base import Spec
from shardscope.spec.space import Space
from shardscope.tuning import apply

OBJECTIVES: Mapping[str, str] = {
    "loss": "loss on held-back data, at the end",
    "error": "share of wrong answers on held-back data, at the end",
    "seconds": "training time: the median step times the steps, of the slowest rank",
    "bytes": "sent by all ranks together over the run",
    "memory": "bytes on the rank that holds most",
}
"""What can be minimised, by measurement, all of it: the less the better."""
QUALITIES = ("loss", "error")


class Definition(Spec):
    """A study: a job, what of it may change, and what is minimised.

    `own` are objectives by functions of the user's; they are known by name and must be given again to go on.
    """

    job: Job
    space: Space
    objectives: tuple[str, ...] = Field(min_length=1)
    own: tuple[str, ...] = ()
    equal: Literal["samples", "steps"] = "samples"
    """What trials of another batch size keep."""

    @model_validator(mode="after")
    def _possible(self) -> Definition:
        for name in self.objectives:
            if name not in OBJECTIVES and name not in self.own:
                raise unknown_name("objective", name, OBJECTIVES)
        if len(set(self.objectives)) < len(self.objectives):
            raise SpecError(f"objectives={list(self.objectives)} name one twice; name each once")
        if not set(self.objectives) & {*QUALITIES, *self.own}:
            raise SpecError(
                f"objectives={list(self.objectives)} say nothing of quality, which the fewest steps would then win; "
                "add 'loss' or 'error'"
            )
        apply.check(self.job, self.space)
        return self

    @property
    def quality(self) -> str | None:
        """The objective that is known only from training: ``loss`` or ``error``; None if it is the user's own."""
        return next((name for name in self.objectives if name in QUALITIES), None)

    def difference(self, other: Definition) -> str | None:
        """What another definition has otherwise, as a clause; None where nothing is."""
        if self.job.model_dump() != other.job.model_dump():
            changed = _changed(self.job.model_dump(), other.job.model_dump())
            return f"the job has another {changed}"
        if self.space != other.space:
            names = sorted(
                name
                for name in {*self.space.parameters, *other.space.parameters}
                if self.space.parameters.get(name) != other.space.parameters.get(name)
            )
            return f"the space has changed in {', '.join(names)}"
        if self.objectives != other.objectives:
            return f"the objectives were {', '.join(self.objectives)}"
        return None if self.equal == other.equal else f"equal was {self.equal!r}"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(name for name in before if before[name] != after[name])
