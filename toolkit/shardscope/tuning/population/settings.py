"""Settings by dotted path, such as ``optimizer.lr``, and their application to a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.errors import unknown_name
from shardscope.spec import Job, Method
from shardscope.spec._base import Spec

Settings = Mapping[str, Any]
"""Settings by dotted path. Values are JSON: a number, a string, or the fields of a part of the job."""

MAY_CHANGE = ("optimizer", "lr_schedule", "batch", "compression", "clip_norm", "strategy", "recompute")
"""Fields of a job that may change without making a checkpoint unusable."""


def check_path(job: Job, path: str) -> None:
    """Reject a path that does not name a setting of `job` that may change during training.

    Raises:
        SpecError: The path is unknown; the message suggests the closest valid one.
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
    """Return `job` with its settings changed.

    Args:
        job: The job to change.
        settings: New values by dotted path.

    Raises:
        SpecError: The settings are invalid for the job.

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
    """Return a part of a job with `fields` changed; a new method keeps the fields that were set explicitly."""
    if isinstance(part, Method) and "name" in fields:
        other: Spec = part.base_class().by_name(**{**part.changed, **fields})
        return other
    return part.replace(**fields)


def as_json(value: Any) -> Any:
    """Return a setting as JSON; a part of a job becomes the dictionary of its fields."""
    if isinstance(value, Spec):
        return value.model_dump(mode="json", exclude_none=True, exclude_defaults=isinstance(value, Method))
    return value
