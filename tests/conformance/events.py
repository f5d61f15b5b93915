"""Events as ranks write them, with only the fields that a test is about spelt out."""

from __future__ import annotations

from typing import Any


def step_event(step: int, rank: int = 0, **fields: Any) -> dict[str, Any]:
    """A valid step event of one rank; `fields` replace the defaults."""
    return {
        "event": "step", "t": float(step), "step": step, "rank": rank, "step_time_s": 0.1, "traffic": {}, "loss": 1.0,
        "peak_memory_bytes": 1, "memory_bytes": 1, "samples": 4, "tokens": None, "lr": 0.1, "grad_norm": None, **fields,
    }  # fmt: skip


def traffic(sent_bytes: int, name: str = "all_reduce", messages: int = 1) -> dict[str, Any]:
    """The traffic of one collective, in the form that events carry."""
    return {name: {"sent_bytes": sent_bytes, "received_bytes": sent_bytes, "messages": messages}}
