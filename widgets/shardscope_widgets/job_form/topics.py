"""The topics under which the Training Lab folds its controls: one table of trait names, in display order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets as t

from shardscope_widgets.job_form.choices import KINDS, JobChoices
from shardscope_widgets.job_form.families import settings_of_method
from shardscope_widgets.kit.form import in_groups, setting_in

FIRST = ("model", "strategy", "world_size")
"""Controls that are always in view."""
TOPICS: Mapping[str, Sequence[str]] = {
    "Settings of the strategy": ("strategy_options",),
    "Batch": ("global_batch", "micro_batch", "shares"),
    "Link and compression": ("bandwidth", "latency", "compression", "compression_options"),
    "Optimizer": ("optimizer", "lr", "lr_schedule", "lr_schedule_options"),
    "Data and steps": ("data", "steps", "seed"),
    "Precision and recomputation": ("precision", "recompute"),
    "Checkpoints and recovery": ("checkpoint_every", "restarts", "elastic"),
    "Recording": ("noise_scale",),
}
"""Traits by topic; the settings of a method follow the trait that selects the method. Any other fields of a job are
added to the last topic."""
OPTIONS = {f"{kind}_options": kind for kind in KINDS}
"""Traits with the settings of a method, and the trait that selects the method."""


def topics() -> dict[str, list[str]]:
    """Return the trait names by topic, including those of fields that no topic mentions."""
    _, *groups = in_groups(JobChoices, [FIRST, *TOPICS.values()])
    return dict(zip(TOPICS, groups, strict=True))


def all_names() -> list[str]:
    """Return the names of all traits of the form, in display order."""
    return [*FIRST, *(name for names in topics().values() for name in names)]


def topic_text(title: str, names: Sequence[str], choices: JobChoices) -> str:
    """Return the title of a topic, followed by the values that differ from the form's defaults."""
    changed = [text for name in names for text in _changed(name, choices)]
    return f"{title}: {', '.join(changed)}" if changed else title


def _changed(name: str, choices: JobChoices) -> list[str]:
    value = getattr(choices, name)
    if name in OPTIONS:
        kind = OPTIONS[name]
        known = settings_of_method(KINDS[kind], getattr(choices, kind))
        labels = {setting.field: setting.label.lower() for setting in known}
        in_view = choices.degrees if kind == "strategy" else {}
        return [
            _valued(labels.get(field, field), each) for field, each in value.items() if field not in in_view
        ]
    setting = setting_in(JobChoices, name)
    if value == default_of(name):
        return []
    is_free_text = setting.kind == "text" and not setting.values
    if is_free_text or setting.kind in {"count", "number", "switch"}:
        return [_valued(setting.label.lower(), value)]
    return [str(getattr(value, "__name__", value))]


def _valued(label: str, value: Any) -> str:
    if isinstance(value, bool):
        return label if value else f"no {label}"
    return f"{label} {getattr(value, 'name', value)}"


def default_of(name: str) -> Any:
    """Return the value of a trait in a new form."""
    trait = JobChoices.class_traits()[name]
    return {} if isinstance(trait, t.Dict) else trait.default_value


def reset(choices: JobChoices, values: Mapping[str, Any]) -> None:
    """Reset the form: set the traits in `values` to the given values, and all other traits to their defaults."""
    last = {"lr", "latency", "data"}  # choosing an optimizer, a link or a model sets these
    for name in sorted(all_names(), key=lambda name: (name in OPTIONS, name in last)):
        setattr(choices, name, values.get(name, default_of(name)))
    for name in last & values.keys():
        setattr(choices, name, values[name])
