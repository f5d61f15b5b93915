"""Contents of the table of trials: a column per setting and objective, with sort keys. No widgets here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardscope_widgets.figures._trials import TrialInfo, objective_text, settings_of, short_name
from shardscope_widgets.tuning_lab._words import state_of


class TableInfo(NamedTuple):
    """Header and rows of the table of trials."""

    header: tuple[str, ...]
    texts: tuple[int, ...]
    """Indices of the columns that hold text, not numbers."""
    rows: tuple[Mapping[str, Any], ...]
    """Number, state, mark after the state, cells and sort keys of each trial.

    Keys are in seconds and bytes, regardless of the unit shown.
    """


def table_info(trials: Sequence[TrialInfo], objectives: Sequence[str]) -> TableInfo:
    """Return the table of all trials; settings of different branches with the same short name share a column."""
    names = list(dict.fromkeys(name for trial in trials for name in settings_of(trial)))
    keys = [_settings(trial) for trial in trials]
    words = [name for name in names if any(isinstance(key.get(name), str) for key in keys)]
    header = ("trial", "state", *objectives, *names, "why")
    texts = (1, *(2 + len(objectives) + names.index(name) for name in words), len(header) - 1)
    rows = (_row(trial, objectives, names, words) for trial in trials)
    return TableInfo(header, texts, tuple(rows))


def _row(
    trial: TrialInfo, objectives: Sequence[str], names: Sequence[str], words: Sequence[str]
) -> dict[str, Any]:
    values = [trial.values.get(name) for name in objectives]
    told = [objective_text(n, v) if v is not None else "" for n, v in zip(objectives, values, strict=True)]
    settings, keys = settings_of(trial), _settings(trial)
    sorting = [settings.get(name) if name in words else keys.get(name) for name in names]
    why = re.split("[,:] ", trial.reason or trial.note)[0]  # the panel of the chosen trial shows the rest
    state = "front" if trial.is_front else trial.state
    mark = " ★" if trial.is_pinned else ""
    return {
        "number": trial.number, "state": state, "mark": "baseline" if trial.is_baseline else "",
        "cells": [f"{trial.number}{mark}", state_of(trial), *told, *(settings.get(n, "") for n in names), why],
        "keys": [trial.number, state, *values, *sorting, why],
    }  # fmt: skip


def _settings(trial: TrialInfo) -> dict[str, Any]:
    """Return the values of a trial's settings by short name.

    A value is text if it is not a number, or if two settings have the same short name.
    """
    found: dict[str, Any] = {}
    for name, value in trial.params:
        short = short_name(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        found[short] = value if is_number and short not in found else str(value)
    return found
