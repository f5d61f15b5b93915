"""A row of a log of torchtitan: its typical throughput, and the batch if the log contains it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from shardscope.errors import DataError
from shardscope.measure.calibrate.logs.arguments import count
from shardscope.measure.calibrate.logs.steps import APART, WARM_UP, Step, sessions_of, typical
from shardscope.measure.calibrate.logs.text import Line
from shardscope.spec.model import Transformer

_STEP = re.compile(
    r"\bstep: +([0-9]{1,12}) (?:(?!\bstep: ).)*"
    r"\b(?:tps|wps): +([0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,12})(?:\.[0-9]*)?(?=\s|$)"
)
"""A step's number, and tokens per second of one device, which were words per second in 2024."""
_LOGGERS_PREFIX = re.compile(r"(?:^[\s\d:,.TZ/+-]*|[\]|>]|\s-|\b(?:INFO|DEBUG|WARNING)\b(?::[\w.]*)*)\s*$")
"""What may precede a training step on its line: nothing, times, or the end of a logger's prefix."""
_LABEL = re.compile(r"(?i)\b(?:(?:in)?val|eval|test|dev\b|held\W?out)\w*\W*$")
"""The name of a loop other than training, set off by a logger."""
_START = re.compile(r"Training starts at step ([0-9]{1,12})")
_WHOLE = r"([0-9]+(?:,[0-9]{3})*)"
_BATCH = re.compile(rf"local batch size {_WHOLE}, global batch size {_WHOLE}.*?sequence length {_WHOLE}")
"""The batch, on the line at the start of the trainer or, in 2024 and early 2025, of training."""


def row(lines: Sequence[Line], name: str, given: Transformer | None) -> dict[str, Any] | None:
    """Return the batch and the typical throughput of a log of torchtitan; None if it has no step.

    Raises:
        DataError: There are too few steps, or steps of several runs.
    """
    del given  # the log says nothing that a model could contradict
    steps, resumed = _steps(lines)
    if not steps:
        return None
    told = [match.groups() for line in lines if (match := _BATCH.search(line.text))]
    batches = dict.fromkeys(tuple(number.replace(",", "") for number in each) for each in told)
    if len(batches) > 1:
        one, other = (f"a global batch of {total} of {seq} tokens" for _, total, seq in list(batches)[:2])
        raise DataError(f"rows={name!r} is from several runs, with {one} and {other}; give one file per run")
    sessions = sessions_of(steps)
    _check_restarts(sessions, resumed, name)
    _check_repeats(sessions, name)
    stated = next(iter(batches), None)
    settings = {}
    if stated is not None:
        settings = {
            "global_batch": count(stated[1], "global batch size"),
            "seq": count(stated[2], "sequence length"),
        }
    return {"software": "torchtitan", **settings, "tokens_per_s_per_device": typical(sessions, name)}


class _Start(NamedTuple):
    """A start of training that a rank has reported."""

    place: int = 0
    number: int = 0
    """First step after the start; above 1 if a checkpoint was loaded."""
    has_run: bool = False


def _steps(lines: Sequence[Line]) -> tuple[list[Step], set[int]]:
    """Return the training steps, and which starts resumed training; truncated lines are left out."""
    found: list[tuple[bool, Step]] = []
    resumed: set[int] = set()
    starts: dict[str, _Start] = {}
    for line in lines:
        now = starts.get(line.rank, _Start())
        if match := _START.search(line.text):
            now = _next(now, int(match[1]))
            resumed |= {now.place} if now.number > 1 else set()
        for match in _STEP.finditer(line.text):
            if _is_of_training(line.text, match.start()):
                step = Step(int(match[1]), float(match[2].replace(",", "")), line.rank, now.place)
                found.append((match.end() == len(line.text.rstrip()), step))
                now = now._replace(has_run=True)
        starts[line.rank] = now
    are_all = all(is_end for is_end, _ in found)
    return [step for is_end, step in found if are_all or not is_end], resumed


def _is_of_training(text: str, place: int) -> bool:
    start = max(0, place - 80)
    return _LOGGERS_PREFIX.search(text, start, place) is not None and not _LABEL.search(text, start, place)


def _next(now: _Start, number: int) -> _Start:
    """Return the start that a line reports: the current start, if another rank reported it first, or a new start."""
    is_same = number == now.number and (number == 1 or not now.has_run)
    return now if is_same else _Start(now.place + 1, number)


def _check_restarts(sessions: Sequence[Sequence[Step]], resumed: Collection[int], name: str) -> None:
    """Reject a log in which a rank repeats steps, unless the log says that training resumed there."""
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


def _check_repeats(sessions: Sequence[Sequence[Step]], name: str) -> None:
    """Reject steps that are logged more than once at different rates, because ranks of one run have similar rates.

    A tenth of the steps may differ, because a rank that waits for something else may log a step late.
    """
    rates: dict[tuple[int, int], list[float]] = {}
    for session in sessions:
        warm = set(sorted({step.number for step in session})[:WARM_UP])
        for step in session:
            if step.number not in warm:
                rates.setdefault((step.start, step.number), []).append(step.value)
    repeated = {key: values for key, values in rates.items() if len(values) > 1}
    apart = [key for key, values in repeated.items() if max(values) > APART * min(values)]
    if len(apart) > len(repeated) // 10:
        values = repeated[apart[0]]
        raise DataError(
            f"rows={name!r} states step {apart[0][1]} at {min(values):,.0f} and {max(values):,.0f} tokens/s, so it has "
            "lines of another loop, such as validation's, or of another run; give the lines of training alone"
        )
