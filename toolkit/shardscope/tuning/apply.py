"""Build the job of a trial (the study's job with the sampled settings applied) and check that it fits into memory.

The memory check evaluates formulas, without torch and without running the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from shardscope.analytic.large_batch import scaled_lr
from shardscope.errors import DataError, SpecError
from shardscope.machine import usable_memory_bytes
from shardscope.runtime.launcher.preflight import memory_needed
from shardscope.spec import Batch, Compression, Job, LRSchedule, Optimizer
from shardscope.spec.space import BRANCHES, Choices, Space, Value, parse_name
from shardscope.spec.units import gib_text, positive, quantity
from shardscope.storage.rows import require_batch, require_rows, training_rows

_COPIED_FIELDS = ("strategy", "precision", "recompute", "clip_norm", "world_size", "seed")


def branches_of(job: Job) -> dict[str, str]:
    """Return the job's method in each field on which a space may branch, such as ``{"optimizer": "adamw"}``."""
    return {owner: getattr(job, owner).name for owner in BRANCHES}


def apply(job: Job, params: Mapping[str, Value], *, equal: str = "samples") -> Job:
    """Return a copy of the job with the settings of a trial applied.

    Args:
        job: The study's job.
        params: New values, keyed by the names of a `Space`; ``batch`` is the global batch size in samples.
        equal: Whether a trial with a different batch size trains on as many ``samples`` as the job (and so for as many
            epochs), or for as many ``steps``.

    Raises:
        SpecError: The settings are incompatible with each other or with the job.
    """
    parts = {name: parse_name(name) for name in params}
    fields: dict[str, Any] = {name: params[name] for name in _COPIED_FIELDS if name in params}
    batch = int(str(params.get("batch", job.batch.global_batch)))
    if batch != job.batch.global_batch:
        fields["batch"] = _batch(job, batch)
        fields["steps"] = _steps(job, batch) if equal == "samples" else job.steps
    optimizer = _optimizer(job, params, parts)
    rule = str(params.get("lr_rule", "none"))
    if rule != "none":
        base = {"lr": optimizer.lr, "base_batch": job.batch.global_batch}
        optimizer = optimizer.replace(lr=float(scaled_lr(batch, rule=rule, **base)))  # type: ignore[arg-type]
    fields["optimizer"] = optimizer
    steps = fields.get("steps", job.steps)
    fields["compression"] = _compression(job, params, parts, steps)
    fields["lr_schedule"] = _lr_schedule(job, params, parts, steps)
    return job.replace(**fields)


def _batch(job: Job, size: int) -> Batch:
    """Return a batch of `size` samples, with the job's micro-batch size (and so its memory) if that divides `size`."""
    micro = job.batch.micro_batch
    return Batch(
        global_batch=size, micro_batch=micro if micro and size % micro == 0 and micro <= size else None
    )


def _steps(job: Job, batch: int) -> int:
    return max(1, round(job.steps * job.batch.global_batch / batch))


def _settings(
    owner: str, branch: str, params: Mapping[str, Value], parts: Mapping[str, Any]
) -> dict[str, Value]:
    return {
        parts[name].setting: value
        for name, value in params.items()
        if parts[name].owner == owner and parts[name].setting and parts[name].branch in (None, branch)
    }


def _optimizer(job: Job, params: Mapping[str, Value], parts: Mapping[str, Any]) -> Optimizer:
    name = str(params.get("optimizer", job.optimizer.name))
    base = job.optimizer if name == job.optimizer.name else Optimizer(name=name)
    return base.replace(**_settings("optimizer", name, params, parts))


def _compression(job: Job, params: Mapping[str, Value], parts: Mapping[str, Any], steps: int) -> Compression:
    name = str(params.get("compression", job.compression.name))
    base = job.compression if name == job.compression.name else Compression(name=name)
    base = base.stretched(job.steps, steps)
    return base.replace(**_settings("compression", name, params, parts))


def _lr_schedule(job: Job, params: Mapping[str, Value], parts: Mapping[str, Any], steps: int) -> LRSchedule:
    """Return the trial's learning-rate schedule, with the job's warm-up fraction unless ``warmup`` is searched."""
    own = job.lr_schedule
    name = str(params.get("lr_schedule", own.name))
    share = params.get("warmup")
    warmup = own.warmup_steps * steps / job.steps if share is None else float(share) * steps
    base = own if name == own.name else LRSchedule(name)
    fields = {"warmup_steps": min(steps, round(warmup)), **_settings("lr_schedule", name, params, parts)}
    return base.replace(**fields)


def check(job: Job, space: Space, *, equal: str = "samples") -> None:
    """Reject a space that contains a value with which no trial could run.

    Each choice, and both ends of each range, is tried in a separate job, in combination with every branch on which the
    parameter is active.

    Raises:
        SpecError: A value is impossible, or a parameter has no effect; the message names the parameter and the reason.
    """
    for name, parameter in space.parameters.items():
        parts = parse_name(name)
        for value in parameter.ends():
            tried = [{**branch, name: value} for branch in _branches(job, space, name)]
            faults = [fault for params in tried if (fault := fault_of(job, params, equal))]
            if tried and len(faults) == len(tried):
                raise SpecError(f"space[{name!r}]: {value!r} is not possible: {faults[0]}")
        if parts.setting and not _branches(job, space, name):
            raise SpecError(
                f"space[{name!r}] has no effect: {parts.owner} is {branches_of(job)[parts.owner]!r}; "
                f"add {parts.owner!r} to the space, or leave this parameter out"
            )


def checked_rows(job: Job) -> Job:
    """Return the job, after a check that its data have enough rows for its batch, if the number of rows is known.

    Raises:
        SpecError: The data have fewer rows.
    """
    try:
        require_batch(job)
    except DataError as error:
        raise SpecError(str(error)) from None
    return job


def check_rows(job: Job, space: Space) -> None:
    """Reject a space with a batch size that is larger than the job's data.

    Raises:
        SpecError: A batch size is too large; the message names it.
    """
    batches, rows = space.parameters.get("batch"), training_rows(job)
    if batches is None or rows is None:
        return
    for value in batches.ends():
        try:
            require_rows(int(str(value)), rows)
        except DataError as error:
            raise SpecError(f"space['batch']: {value!r} is not possible: {error}") from None


def _branches(job: Job, space: Space, name: str) -> list[dict[str, Value]]:
    """Return the combinations of other choices, such as optimizers, on which the parameter `name` is tried."""
    chosen: list[dict[str, Value]] = [{}]
    for owner in dict.fromkeys(("optimizer", "compression", "strategy", parse_name(name).owner)):
        parameter = space.parameters.get(owner)
        own = [str(v) for v in parameter.values] if isinstance(parameter, Choices) else None
        if own is not None and owner != name:
            chosen = [{**one, owner: value} for one in chosen for value in own]
    parts = parse_name(name)
    if parts.setting is None:
        return chosen
    defaults = branches_of(job)
    return [one for one in chosen if name in set(space.active(one, defaults))]


def fault_of(job: Job, params: Mapping[str, Value], equal: str = "samples") -> str | None:
    """Return why these settings make the job invalid; None if it is valid."""
    try:
        apply(job, params, equal=equal)
    except SpecError as error:
        return str(error)
    return None


class MemoryLimit:
    """Memory limit per rank; trials that do not fit are rejected before launch.

    Only jobs whose memory `shardscope.runtime.launcher.preflight` can predict are checked; any other job is accepted.

    Args:
        bytes_per_rank: Memory that each rank may use, in bytes or as text such as ``"2 GiB"``. None divides the
            machine's free memory equally among the ranks.

    Raises:
        SpecError: The limit is not a number of bytes above 0.
    """

    def __init__(self, bytes_per_rank: float | str | None = None) -> None:
        self._bytes_per_rank = (
            None
            if bytes_per_rank is None
            else positive(
                quantity(bytes_per_rank, "bytes", field="memory_limit"),
                field="memory_limit",
                given=bytes_per_rank,
            )
        )

    def fault(self, job: Job) -> str | None:
        """Return a sentence on why the job does not fit; None if it fits or cannot be predicted."""
        needed = predicted_peak(job)
        if needed is None:
            return None
        limit = self._bytes_per_rank if self._bytes_per_rank is not None else _free_bytes() / job.world_size
        if needed <= limit:
            return None
        return (
            f"a rank would need {gib_text(needed)}, but may use only {gib_text(limit)}; use a smaller batch, "
            "smaller micro-batches, or a higher ZeRO stage"
        )


def predicted_peak(job: Job) -> float | None:
    """Return the peak memory of the rank with the highest peak, in bytes; None if no formula describes the job."""
    needed = memory_needed(job)
    return None if needed is None else needed.peak_bytes


def _free_bytes() -> float:
    return float(min(psutil.virtual_memory().available, usable_memory_bytes()))
