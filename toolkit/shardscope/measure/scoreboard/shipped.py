"""The scores of published tables, as `tests/published/shipped.py` found them for this release."""

from __future__ import annotations

import json
from importlib.resources import files
from math import nan
from typing import Any


def shipped_scores() -> dict[str, Any]:
    """Return the scores of tables of step times and of memory, in the form that the command prints as JSON."""

    def defined(found: dict[str, Any]) -> dict[str, Any]:
        return {name: nan if value is None else value for name, value in found.items()}

    text = (files("shardscope.measure.scoreboard") / "scores.json").read_text("utf-8")
    return dict(json.loads(text, object_hook=defined))
