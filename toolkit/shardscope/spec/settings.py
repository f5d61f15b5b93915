"""The settings of jobs as a flat table: which of them differ between jobs, and a short text for each.

Settings that do not change what is trained or how (name, records, checkpoints, time limit) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardscope.spec.job import Job
from shardscope.spec.job_parts import label_of
from shardscope.spec.units import three_digits

_LEFT_OUT = frozenset(
    {"name", "record", "checkpoint", "recovery", "timeout_s", "eval_every", "until", "elastic"}
)
_FIRST = (
    "model", "data", "strategy", "optimizer", "optimizer.lr", "batch.global_batch", "compression", "world_size",
    "precision", "lr_schedule", "link",
)  # fmt: skip
"""The settings that come first in tables and names, in this order."""
_METHODS = frozenset({"strategy", "compression", "optimizer", "lr_schedule"})
_NAMES = {
    "world_size": "ranks", "batch.global_batch": "batch", "batch.micro_batch": "micro-batch", "optimizer.lr": "lr",
    "lr_schedule": "lr schedule", "clip_norm": "clip norm",
}  # fmt: skip
_WITHOUT = {
    "compression": "uncompressed", "link": "no link", "clip_norm": "no clipping", "recompute": "no recompute",
    "batch.micro_batch": "undivided batch",
}  # fmt: skip
"""Texts for settings that are switched off."""

_NOT_WORK = frozenset({"world_size", "link", "batch.micro_batch", "steps", "seed", "optimizer.lr"})
_NOT_WORK_OF = frozenset({"strategy", "compression", "lr_schedule"})
"""Settings on the division of the work, or that do not change the step time of a single process."""

Settings = Mapping[str, Any]
"""The settings of one job by name, such as ``optimizer.lr``; a method's own name is under the name of its field."""


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings of a job by name, the most important ones first.

    Example:
        >>> settings_of(Job(model="mlp", data="digits", strategy="ring"))["optimizer.lr"]
        0.001
    """
    fields = job.model_dump(mode="json", include=set(Job.model_fields) - _LEFT_OUT)
    fields |= {"model": label_of(job.model), "data": label_of(job.data), "loss": label_of(job.loss)}
    fields["link"] = None if job.link is None else job.link.label
    flat = dict(_flat(fields))
    first = {name: flat.pop(name) for name in _FIRST if name in flat}
    return first | flat


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flat(value, f"{path}.")
        elif name == "name" and prefix:
            yield prefix.removesuffix("."), value
        else:
            yield path, tuple(value) if isinstance(value, list) else value


def differing(jobs: Sequence[Settings]) -> tuple[str, ...]:
    """Return the names of the settings in which jobs differ, the most important ones first.

    The settings of a method, such as the momentum of an optimizer, are compared only between jobs with the same method,
    because other methods have other settings or defaults. The learning rate is compared between all jobs.
    """
    names = dict.fromkeys(name for settings in jobs for name in settings)
    ordered = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    return tuple(name for name in ordered if _differs(name, jobs))


def _differs(name: str, jobs: Sequence[Settings]) -> bool:
    method = name.partition(".")[0]
    is_option = method in _METHODS and name not in (method, "optimizer.lr")
    values: dict[Any, set[str]] = {}
    for settings in jobs:
        if name in settings:
            values.setdefault(settings[method] if is_option else None, set()).add(repr(settings[name]))
    return any(len(found) > 1 for found in values.values())


def heading_of(name: str) -> str:
    """Return the heading of a setting in tables: ``lr`` for ``optimizer.lr``, ``ratio`` for ``compression.ratio``."""
    return _NAMES.get(name) or name.rpartition(".")[2].replace("_", " ")


def value_text(name: str, value: Any) -> str:
    """Format the value of a setting: ``0.01``, ``uncompressed``, ``bf16-mixed``."""
    if value is None or value == "none":
        return _WITHOUT.get(name, "none")
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value_text(name, each) for each in value)
    return three_digits(value) if isinstance(value, float) else str(value)


def is_off(name: str, value: Any) -> bool:
    """Return whether a setting has the value that switches it off, such as no compression."""
    return name in _WITHOUT and (value is None or value == "none")


def words_of(name: str, value: Any) -> str:
    """Format a setting so that it can be understood without a heading: ``lr 0.01``, ``4 ranks``, ``int8``.

    Example:
        >>> words_of("optimizer.lr", 0.01), words_of("world_size", 4), words_of("compression", "none")
        ('lr 0.01', '4 ranks', 'uncompressed')
    """
    text = value_text(name, value)
    if name == "world_size":
        return f"{text} rank" if value == 1 else f"{text} ranks"
    if name == "steps":
        return f"{text} steps"
    if name in _METHODS or name in {"model", "data", "precision", "link"} or is_off(name, value):
        return text
    return f"{heading_of(name)} {text}"


def workload_of(job: Job) -> tuple[tuple[str, str], ...]:
    """Return all settings that determine the step time on one process: model, data, batch, precision, optimizer, ...

    Jobs with equal workloads divide the same work in different ways, so their throughputs can be compared. The
    strategy, compression, link and number of ranks are not part of the workload, nor are the learning rate, its
    schedule, the seed and the number of steps.
    """
    return tuple(
        (name, repr(value))
        for name, value in sorted(settings_of(job).items())
        if name not in _NOT_WORK and name.partition(".")[0] not in _NOT_WORK_OF
    )


def one_process_baseline(job: Job, others: Sequence[Job]) -> int | None:
    """Return the index of the single-process job in `others` with the same workload as `job`; None if there is none.

    If there are several, the job that shares the most other settings with `job` is chosen; in a tie, the last one.
    """
    return _closest(job, others, lambda other: other.world_size == 1)


def uncompressed_baseline(job: Job, others: Sequence[Job]) -> int | None:
    """Return the index of the uncompressed job in `others` with the same workload, strategy and ranks as `job`.

    None if there is none. If there are several, the job that shares the most other settings is chosen.
    """
    return _closest(
        job, others,
        lambda other: (
            not other.compression.is_on
            and (other.world_size, other.strategy) == (job.world_size, job.strategy)
        ),
    )  # fmt: skip


def _closest(job: Job, others: Sequence[Job], is_baseline: Callable[[Job], bool]) -> int | None:
    own, work = settings_of(job), workload_of(job)
    alike = [
        (sum(own.get(name) == value for name, value in settings_of(other).items()), index)
        for index, other in enumerate(others)
        if is_baseline(other) and workload_of(other) == work
    ]
    return max(alike)[1] if alike else None
