"""Settings by dotted path, such as ``optimizer.lr``, and the job that they make of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.errors import unknown_name
from shardscope.spec import Job, Method
from shardscope.spec._base import Spec

Settings = Mapping[str, Any]
"""By dotted path; values as JSON has them: a number, a word, or the fields of a part of the job."""

MAY_CHANGE = ("optimizer", "lr_schedule", "batch", "compression", "clip_norm", "strategy", "recompute")
"""Fields of a job under whose changes a checkpoint still fits."""


def check_path(job: Job, path: str) -> None:
    """Refuse a path that names nothing of `job` that may change while it trains.

    Raises:
        SpecError: Naming the nearest that does.
    """
    head, _, leaf = path.partition(".")
    if head not in MAY_CHANGE:
        raise unknown_name("setting of the space", path, MAY_CHANGE)
    if leaf:
        part = getattr(job, head)
        fields = list(type(part).model_fields) if isinstance(part, Spec) else []
        fields += ["name"] * isinstance(part, Method)
        if leaf not in fields:
            raise unknown_name("setting of the space", path, [f"{head}.{field}" for field in fields])


def with_settings(job: Job, settings: Settings) -> Job:
    """`job` with these settings.

    Raises:
        SpecError: No such job can exist.

    Example:
        >>> job = Job(model="mlp", data="digits")
        >>> with_settings(job, {"optimizer.lr": 0.01, "batch": 32}).batch.global_batch
        32
    """
    changes: dict[str, Any] = {path: value for path, value in settings.items() if "." not in path}
    parts: dict[str, dict[str, Any]] = {}
    for path, value in settings.items():
        head, _, leaf = path.partition(".")
        if leaf:
            parts.setdefault(head, {})[leaf] = value
    job = job.replace(**changes) if changes else job
    return job.replace(**{head: _with_fields(getattr(job, head), fields) for head, fields in parts.items()})


def _with_fields(part: Spec, fields: Mapping[str, Any]) -> Spec:
    """Another name takes over what was set for the one before."""
    if isinstance(part, Method) and "name" in fields:
        other: Spec = part.base_class().by_name(**{**part.changed, **fields})
        return other
    return part.replace(**fields)


def as_json(value: Any) -> Any:
    """A setting as JSON has it: a part of a job by the fields that were given."""
    if isinstance(value, Spec):
        return value.model_dump(mode="json", exclude_none=True, exclude_defaults=isinstance(value, Method))
    return value
