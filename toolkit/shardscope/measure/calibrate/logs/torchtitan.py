"""A row of a log of torchtitan: its typical throughput, and the batch where the log states it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardscope.errors import DataError
from shardscope.measure.calibrate.logs.steps import Step, sessions_of, typical
from shardscope.measure.calibrate.logs.text import Line
from shardscope.spec.model import Transformer

_STEP = re.compile(
    r"\bstep: +(\d+) (?:(?!\bstep: ).)*\b(?:tps|wps): +(\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?=\s|$)"
)
"""A step's number, and tokens per second of one device, which were words per second in 2024."""
_OF_VALIDATION = re.compile(r"(?i)\b(?:(?:in)?val|eval|test)\w*\W*$")
"""What stands before the step in lines that measure another loop than training's."""
_START = re.compile(r"Training starts at step (\d+)")
_BATCH = re.compile(r"local batch size (\d+), global batch size (\d+).*?sequence length (\d+)")
"""In the line in which the trainer starts, or in 2024 and early 2025, training."""


def row(lines: Sequence[Line], name: str, given: Transformer | None) -> dict[str, Any] | None:
    """Return the batch and the typical throughput of a log of torchtitan; None if it has no step.

    Raises:
        DataError: There are too few steps, or those of several runs.
    """
    del given  # the log says nothing that a model could contradict
    steps = _steps(lines)
    if not steps:
        return None
    batches = {match.groups(): match for line in lines if (match := _BATCH.search(line.text))}
    if len(batches) > 1:
        one, other = (f"a global batch of {total} of {seq} tokens" for _, total, seq in list(batches)[:2])
        raise DataError(f"rows={name!r} is of several runs, with {one} and {other}; give one file per run")
    sessions = sessions_of(steps)
    _check_restarts(sessions, name)
    stated = next(iter(batches), None)
    settings = {} if stated is None else {"global_batch": int(stated[1]), "seq": int(stated[2])}
    return {"software": "torchtitan", **settings, "tokens_per_s_per_device": typical(sessions, name)}


def _steps(lines: Sequence[Line]) -> list[Step]:
    """Return the steps of training, without lines that end where others go on, which are cut."""
    found: list[tuple[bool, Step]] = []
    first: dict[str, int] = {}
    for line in lines:
        if match := _START.search(line.text):
            first[line.rank] = int(match[1])
        for match in _STEP.finditer(line.text):
            if not _OF_VALIDATION.search(line.text[max(0, match.start() - 40) : match.start()]):
                value = float(match[2].replace(",", ""))
                step = Step(int(match[1]), value, line.rank, first.get(line.rank, 0))
                found.append((match.end() == len(line.text.rstrip()), step))
    are_all = all(is_end for is_end, _ in found)
    return [step for is_end, step in found if are_all or not is_end]


def _check_restarts(sessions: Sequence[Sequence[Step]], name: str) -> None:
    """Refuse a rank that counts again from a step, unless the log says that training has resumed there."""
    last: dict[str, Step] = {}
    for session in sessions:
        before, step = last.get(session[0].rank), session[0]
        if before is not None and step.number <= before.number and step.start in {0, 1, before.start}:
            raise DataError(
                f"rows={name!r} goes back from step {before.number} to {step.number}, so it has several runs; give one "
                "file per run"
            )
        last[step.rank] = session[-1]
