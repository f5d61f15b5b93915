"""Job described by the controls: the given job with the changes made in the controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscope.spec import Job
from shardscope.spec.models import MODELS
from shardscope_widgets.job_form.choices import AS_IT_IS, KINDS, JobChoices
from shardscope_widgets.job_form.families import options_of
from shardscope_widgets.kit.form import traits_for

FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in traits_for(JobChoices, Job)},
    **{kind: (kind, f"{kind}_options") for kind in KINDS},
    "optimizer": ("optimizer", "lr"), "batch": ("global_batch", "micro_batch"), "link": ("bandwidth", "latency"),
}  # fmt: skip
"""Fields of a job that controls can change, with the traits that determine each."""
PLAIN = tuple(name for name, traits in FIELDS.items() if traits == (name,) and name not in {"model", "data"})
"""Fields whose trait holds the value of the field unchanged."""
FIRST = {"model": "mlp", "data": "digits", "global_batch": 64, "steps": 60}
"""Values of a small job, used if no job is given; a trial of this job takes one to two seconds."""


class JobOfChoices:
    """The job that the controls describe.

    Values that the controls cannot express (exact link parameters, a user-defined model) stay as given.

    Args:
        choices: Object whose traits the controls are synchronised with.
    """

    def __init__(self, choices: JobChoices) -> None:
        self._choices = choices
        self._from_choices: Callable[[], Job] = lambda: JobChoices.job(choices)
        self.base: Job | None = None
        self._before: dict[str, Any] = {}

    def take_defaults(self) -> None:
        """Set the traits that still have their defaults to the values of a small job."""
        for field, value in FIRST.items():
            if getattr(self._choices, field) == JobChoices.class_traits()[field].default_value:
                setattr(self._choices, field, value)

    def take(self, job: Job) -> None:
        """Set the controls to `job`."""
        choices = self._choices
        self.base = job
        for field in ("model", "data"):
            value = getattr(job, field)
            if isinstance(value, str) and (value in MODELS or field == "data"):
                setattr(choices, field, value)
        for field in PLAIN:
            setattr(choices, field, getattr(job, field))
        if job.optimizer.is_here:
            choices.optimizer, choices.lr = job.optimizer.name, job.optimizer.lr
        for kind in KINDS:
            method = getattr(job, kind)
            if method.is_here:
                setattr(choices, kind, method.name)
                setattr(choices, f"{kind}_options", options_of(method))
        choices.global_batch, choices.micro_batch = job.batch.global_batch, job.batch.micro_batch or 0
        choices.bandwidth, choices.latency = (
            (AS_IT_IS, "0") if job.link is None else job.link.label.split(", ")
        )
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        return {trait: getattr(self._choices, trait) for traits in FIELDS.values() for trait in traits}

    def job(self) -> Job:
        """Return the job that the controls describe.

        Raises:
            SpecError: The changes are incompatible.
        """
        if self.base is None:
            return self._from_choices()
        now = self._now()
        changed = [
            field
            for field, traits in FIELDS.items()
            if any(now[trait] != self._before[trait] for trait in traits)
        ]
        if not changed:
            return self.base
        made = self._from_choices()
        return self.base.replace(**{field: getattr(made, field) for field in changed})
