"""The machine, the versions and the settings of the runs in a report, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardscope.spec.observed import ObservedJob
from shardscope_widgets.report.entries import Entry, Group
from shardscope_widgets.words import bytes_text, listed

_VERSIONS = ("shardscope", "torch", "python", "numpy")
Row = tuple[str, str]
"""(name, text) of a row."""


def _batch(job: Any) -> str:
    return f"{job.batch.global_batch} samples per step over all ranks"


def _micro_batch(job: Any) -> str:
    micro = job.batch.micro_batch
    return "a rank's whole share" if micro is None else f"{micro} samples per pass"


def _optimizer(job: Any) -> str:
    rate = getattr(job.optimizer, "lr", None)
    return job.optimizer.label if rate is None else f"{job.optimizer.label}, learning rate {rate:g}"


_SETTINGS: dict[str, Callable[[Any], str]] = {
    "batch": _batch,
    "micro_batch": _micro_batch,
    "optimizer": _optimizer,
    "lr_schedule": lambda job: job.lr_schedule.name,
    "precision": lambda job: job.precision,
    "steps": lambda job: str(job.steps),
    "world_size": lambda job: str(job.world_size),
    "seed": lambda job: str(job.seed),
    "recompute": lambda job: job.recompute,
    "compression": lambda job: job.compression.label,
    "link": lambda job: "this machine's own" if job.link is None else job.link.label,
}
"""Settings of a job in the order of the table, with the functions that format them."""
_NAMES = {
    "batch": "global batch", "micro_batch": "micro-batch", "lr_schedule": "learning-rate schedule",
    "world_size": "ranks", "recompute": "recomputation",
}  # fmt: skip


def settings_rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """Return a row for each setting: its name, and its values in each group of runs."""
    rows = [(_NAMES.get(name, name), *(_values(group, name) for group in groups)) for name in _SETTINGS]
    return [row for row in rows if any(row[1:])]


def _values(group: Group, name: str) -> str:
    """Return the value of a setting if all runs share it, otherwise each value with its runs; empty if unknown."""
    values: dict[str, list[str]] = {}
    for entry in group.entries:
        if _is_known(entry.run.job, "batch" if name == "micro_batch" else name):
            values.setdefault(_SETTINGS[name](entry.run.job), []).append(entry.label)
    return _shared(values) if values else ""


def _is_known(job: Any, name: str) -> bool:
    """Return whether a job has this field; an observed training loop has only the fields that are known."""
    return name in job.model_fields_set if isinstance(job, ObservedJob) else hasattr(job, name)


def _shared(values: dict[str, list[str]]) -> str:
    """Format the values: the most frequent value without its runs, all other values with their runs."""
    common, *others = sorted(values, key=lambda value: -len(values[value]))
    return "; ".join([common, *(f"{value} ({listed(values[value])})" for value in others)])


def machine_rows(entries: Iterable[Entry]) -> list[Row]:
    """Return the machine and the versions of the runs, as recorded at their launch; empty if nothing was recorded."""
    found = [provenance for entry in entries if (provenance := getattr(entry.run, "provenance", None))]
    rows = {
        "machine": [_machine(each.machine) for each in found],
        "versions": [", ".join(f"{name} {each.versions[name]}" for name in _VERSIONS if name in each.versions)
                     for each in found],
        "commit": [f"{each.commit[:10]}{' with uncommitted changes' * bool(each.is_dirty)}"
                   for each in found if each.commit],
    }  # fmt: skip
    return [(name, "; ".join(dict.fromkeys(texts))) for name, texts in rows.items() if texts]


def _machine(machine: Any) -> str:
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    parts = [
        str(machine.get("cpu") or ""),
        f"{cores:g} core{'s' * (cores != 1)}" if isinstance(cores, int | float) else "",
        f"{bytes_text(memory)} of memory" if isinstance(memory, int | float) else "",
        listed(map(str, machine.get("gpus") or ())) or "no GPU",
        str(machine.get("platform") or ""),
    ]
    return ", ".join(filter(None, parts))
