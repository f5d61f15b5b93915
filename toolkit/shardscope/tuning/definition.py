"""Definition of a study: stored when the study is created, and compared with the arguments when it is resumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardscope.errors import SpecError, StudyError, unknown_name
from shardscope.spec import Job, registry
from shardscope.spec._base import Spec
from shardscope.spec.job_parts import label_of
from shardscope.spec.space import Choices, Parameter, PowersOfTwo, Space
from shardscope.spec.units import plural
from shardscope.tuning import apply
from shardscope.tuning.batch_range import BatchRange
from shardscope.tuning.measured import Objective
from shardscope.tuning.objectives import OBJECTIVES, QUALITIES


class Definition(Spec):
    """A study: a job, its search space and its objectives.

    `own` lists the names of user-defined objectives. Only the names are stored, so the functions themselves must be
    passed again when the study is resumed.
    """

    job: Annotated[Job, BeforeValidator(lambda job: Job.from_fields(job) if isinstance(job, dict) else job)]
    space: Space
    objectives: tuple[str, ...] = Field(min_length=1)
    own: tuple[str, ...] = ()
    equal: Literal["samples", "steps"] = "samples"
    """Whether a trial with a different batch size trains on as many samples as the job or takes as many steps."""
    batch_range: BatchRange | None = None
    """How the range of batch sizes was chosen; None if the study did not choose it."""
    baselines: bool = False
    """Whether baseline optimizers are included and settings from the literature are run first."""
    drawn: tuple[str, ...] | None = None
    """The optimizers that the sampler draws; `space` also contains optimizers that only baseline trials use.

    None draws every optimizer of `space`.
    """
    split: Literal["validation"] = "validation"
    """The split on which trials are compared."""
    code: dict[str, str] = Field(default_factory=dict)
    """Digests from `code_of` for the user-defined methods in `job` and `space`."""

    @model_validator(mode="after")
    def _check_objectives(self) -> Definition:
        check_objectives(self.objectives, self.own)
        apply.check(self.job, self.space, equal=self.equal)
        return self

    @property
    def quality(self) -> str | None:
        """The first of the objectives ``loss`` and ``error``; None if only user-defined functions measure quality."""
        return next((name for name in self.objectives if name in QUALITIES), None)

    @property
    def searched(self) -> Space:
        """The space that the sampler draws from: `space` without the optimizers that only baseline trials use."""
        chosen = self.space.parameters.get("optimizer")
        if self.drawn is None or not isinstance(chosen, Choices):
            return self.space
        added = [f"optimizer[{name}]" for name in chosen.values if name not in self.drawn]
        kept = {n: p for n, p in self.space.parameters.items() if n.partition(".")[0] not in added}
        return Space(parameters={**kept, "optimizer": Choices(values=self.drawn)})

    def is_baseline(self, params: Mapping[str, Any]) -> bool:
        """Return whether a trial has an optimizer that the sampler does not draw."""
        return self.drawn is not None and params.get("optimizer", self.drawn[0]) not in self.drawn

    @property
    def batches(self) -> str | None:
        """Sentence on which batch sizes are searched and why; None if the study did not choose them."""
        batches = self.space.parameters.get("batch")
        if self.batch_range is None or not isinstance(batches, PowersOfTwo):
            return None
        return self.batch_range.sentence(batches)

    def in_words(self) -> dict[str, str]:
        """Return the texts about the study that a dashboard shows: ``job`` and, if known, ``batches``."""
        job = self.job
        words = (
            f"{label_of(job.model)} on {label_of(job.data)}: {job.strategy.label}, {plural(job.world_size, 'rank')}, "
            f"{job.steps} steps of {job.batch.global_batch}, {job.optimizer.name}"
        )
        return {"job": words, **({} if self.batches is None else {"batches": self.batches})}

    def require_code(self, *, study: str) -> None:
        """Check, before new trials run, that the user-defined methods have not changed since the study was created.

        Args:
            study: Name of the study, for the message.

        Raises:
            StudyError: The code of a user-defined method has changed.
            SpecError: A user-defined method is not defined in this process.
        """
        changed = _changed(self.code, {**self.code, **code_of(self.job, self.space)})
        if changed:
            raise StudyError(
                f"study {study!r} was created with different code for {changed}; restore that code, or create a "
                "study with another name"
            )
        self.job.require_code()

    def with_batches_of(self, stored: Definition) -> Definition:
        """Return this definition with the stored definition's batch range, if both ranges were chosen automatically."""
        if self.batch_range is None or stored.batch_range is None:
            return self
        return self.centred(stored.space.parameters.get("batch"), stored.batch_range)

    def centred(self, batches: Parameter | None, found: BatchRange) -> Definition:
        """Return the definition with the batch sizes `batches` (None: not searched), chosen as recorded in `found`."""
        others = {name: held for name, held in self.space.parameters.items() if name != "batch"}
        parameters = others if batches is None else {**others, "batch": batches}
        return self.replace(space=Space(parameters=parameters), batch_range=found)

    def difference(self, other: Definition) -> str | None:
        """Return a clause about the first difference between two definitions; None if they are equal."""
        known = {key: text for key, text in other.code.items() if key in self.code}
        recoded = _changed(known, self.code)
        if recoded:
            return f"{recoded} had different code"
        if self.job.model_dump() != other.job.model_dump():
            changed = _changed(self.job.model_dump(), other.job.model_dump())
            return f"the job differs in {changed}"
        if self.baselines != other.baselines:
            return f"baselines was {self.baselines}"
        names = {
            name
            for name in {*self.space.parameters, *other.space.parameters}
            if self.space.parameters.get(name) != other.space.parameters.get(name)
        }
        if set(self.drawn or ()) != set(other.drawn or ()):
            names.add("optimizer")
        if names:
            return f"the space has changed in {', '.join(sorted(names))}"
        if self.objectives != other.objectives:
            return f"the objectives were {', '.join(self.objectives)}"
        return None if self.equal == other.equal else f"equal was {self.equal!r}"


def named_objectives(
    objectives: str | Sequence[str] | Mapping[str, Objective | None],
) -> tuple[tuple[str, ...], dict[str, Objective]]:
    """Return the names of the requested objectives, and the user-defined functions by name."""
    names = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    own = {n: f for n, f in objectives.items() if f is not None} if isinstance(objectives, Mapping) else {}
    return names, own


def check_objectives(names: Sequence[str], own: Collection[str] = ()) -> None:
    """Reject objectives that cannot be measured, and sets of objectives without a measure of quality.

    Args:
        names: Names of the objectives.
        own: Names of the user-defined objectives.

    Raises:
        SpecError: An objective is unknown or given twice, or none of them measures quality.
    """
    for name in names:
        if name not in OBJECTIVES and name not in own:
            raise unknown_name("objective", name, OBJECTIVES)
    if len(set(names)) < len(names):
        raise SpecError(f"objectives={list(names)} contain a duplicate; give each objective once")
    if not set(names) & {*QUALITIES, *own}:
        raise SpecError(
            f"objectives={list(names)} contain no measure of quality, so the trial with the fewest steps would "
            "win; add 'loss' or 'error'"
        )


def code_of(job: Job, space: Space) -> dict[str, str]:
    """Return digests of the current code of the user-defined methods in a job and a space.

    Keys combine the field and the method's name, as in ``lr_schedule='sawtooth'``.
    """
    found = {}
    for place, method in (*job.methods(), *space.methods()):
        cls = type(method) if method.is_here else registry.find(method.base_class(), method.name)
        digest = None if cls is None else cls.code_digest()
        if digest is not None:
            found[f"{place}={method.name!r}"] = digest
    return found


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(name for name in before if before[name] != after[name])
