"""What commands print with --json can be read by a strict parser."""

from __future__ import annotations

import json

from shardscope.commands._output import as_json


def test_numbers_that_json_does_not_have_become_null() -> None:
    text = as_json({"loss": float("inf"), "rows": [(1.5, float("nan"))], "steps": 3})
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "loss": None,
        "rows": [[1.5, None]],
        "steps": 3,
    }
