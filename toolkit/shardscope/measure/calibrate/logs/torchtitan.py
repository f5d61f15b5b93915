"""A row of a log of torchtitan: its typical throughput, and the batch where the log states it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

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
    steps, resumed = _steps(lines)
    if not steps:
        return None
    batches = {match.groups(): match for line in lines if (match := _BATCH.search(line.text))}
    if len(batches) > 1:
        one, other = (f"a global batch of {total} of {seq} tokens" for _, total, seq in list(batches)[:2])
        raise DataError(f"rows={name!r} is of several runs, with {one} and {other}; give one file per run")
    sessions = sessions_of(steps)
    _check_restarts(sessions, resumed, name)
    stated = next(iter(batches), None)
    settings = {} if stated is None else {"global_batch": int(stated[1]), "seq": int(stated[2])}
    return {"software": "torchtitan", **settings, "tokens_per_s_per_device": typical(sessions, name)}


class _Start(NamedTuple):
    """A start that a rank has announced."""

    place: int = 0
    number: int = 0
    """Its first step; above 1 if it has loaded a checkpoint."""
    has_run: bool = False


def _steps(lines: Sequence[Line]) -> tuple[list[Step], set[int]]:
    """Return the steps of training, and which starts have resumed it; without lines that end where others go on."""
    found: list[tuple[bool, Step]] = []
    resumed: set[int] = set()
    starts: dict[str, _Start] = {}
    for line in lines:
        now = starts.get(line.rank, _Start())
        if match := _START.search(line.text):
            now = _next(now, int(match[1]))
            resumed |= {now.place} if now.number > 1 else set()
        for match in _STEP.finditer(line.text):
            if not _OF_VALIDATION.search(line.text[max(0, match.start() - 40) : match.start()]):
                step = Step(int(match[1]), float(match[2].replace(",", "")), line.rank, now.place)
                found.append((match.end() == len(line.text.rstrip()), step))
                now = now._replace(has_run=True)
        starts[line.rank] = now
    are_all = all(is_end for is_end, _ in found)
    return [step for is_end, step in found if are_all or not is_end], resumed


def _next(now: _Start, number: int) -> _Start:
    """Return the start that an announcement stands for: another rank's of the same one, or a new one."""
    is_same = number == now.number and (number == 1 or not now.has_run)
    return now if is_same else _Start(now.place + 1, number)


def _check_restarts(sessions: Sequence[Sequence[Step]], resumed: Collection[int], name: str) -> None:
    """Refuse a rank that counts again from a step, unless the log says that training has resumed there."""
    last: dict[str, Step] = {}
    for session in sessions:
        before, step = last.get(session[0].rank), session[0]
        has_resumed = before is not None and step.start > before.start and step.start in resumed
        if before is not None and step.number <= before.number and not has_resumed:
            raise DataError(
                f"rows={name!r} goes back from step {before.number} to {step.number}, so it has several runs; give one "
                "file per run"
            )
        last[step.rank] = session[-1]
