"""A row from a log of Megatron-LM or Megatron-DeepSpeed: its typical step, and layout and model from its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from shardscope.errors import DataError, SpecError
from shardscope.measure.calibrate.logs import deepspeed
from shardscope.measure.calibrate.logs.arguments import (
    START,
    Arguments,
    arguments_of,
    check_understood,
    count,
    is_set,
)
from shardscope.measure.calibrate.logs.layout import layout_of
from shardscope.measure.calibrate.logs.model import check_given, model_of
from shardscope.measure.calibrate.logs.steps import APART, WARM_UP, Step, sessions_of, typical
from shardscope.measure.calibrate.logs.text import Line
from shardscope.spec.model import Transformer

_STEP = re.compile(
    r"\biteration +([0-9]{1,12}) */(?:(?!\biteration +[0-9]+ */).)*?"
    r"elapsed time per iteration \((ms|s)\): *([0-9]{1,3}(?:,[0-9]{3}){1,4}(?:\.[0-9]*)?|[0-9]{1,15}(?:\.[0-9]*)?) *\|"
    r"(?:.*?\bglobal batch size: *(\d+) *\|)?"
)
"""A step's number, time with unit, and batch. A separator must follow the time, because a line may be cut off."""
_PADDED_VOCAB = re.compile(r"padded vocab .*\(new size: (\d+)\)")
"""The padded vocabulary, on a later line: Megatron pads it only after it has printed its arguments."""
_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
)
_UNREADABLE = {
    "pipe_parallel_size": "GPT-NeoX and DeepSpeed's fork of Megatron 1.1.5 do",
    "batch_size": "Megatron before 2.0 and its forks do",
}
"""Arguments of other programs that print their arguments in the same frame."""
_RAMPS = ("rampup_batch_size", "decrease_batch_size_if_needed", "step_batch_size_schedule")
"""Arguments that change the batch during a run."""


def row(lines: Sequence[Line], name: str, given: Transformer | None) -> dict[str, Any] | None:
    """Return the settings and the typical step of a log of Megatron; None if it has no such step.

    Raises:
        DataError: There are too few steps, or steps of several runs.
        SpecError: The arguments are incomplete, not understood, or contradict the given model.
    """
    steps = _steps(lines)
    if not steps:
        return None
    starts = arguments_of(lines, name)
    if not starts:
        return {"software": "megatron-core", **_without_arguments(lines, steps, name)}
    arguments = dict(starts[0])
    if vocab := next((found for line in lines if (found := _PADDED_VOCAB.search(line.text))), None):
        arguments["padded_vocab_size"] = vocab[1]
    settings = _settings(arguments, name, given)
    if deepspeed.is_used(arguments):
        settings = {"software": "megatron-deepspeed", **settings, **deepspeed.settings(arguments, lines)}
    batch = int(arguments["global_batch_size"])
    ramp = next((each for each in _RAMPS if is_set(arguments, each)), None)
    if ramp is not None and any(step.batch is None for step in steps):
        raise SpecError(
            f"rows={name!r} states {ramp}={arguments[ramp]}, but its steps do not state their global batch size; give "
            "rows of runs with one batch"
        )
    return {"software": "megatron-core", **settings, "step_time_ms": _time(steps, batch, name)}


def _without_arguments(lines: Sequence[Line], steps: Sequence[Step], name: str) -> dict[str, Any]:
    if any(re.search(rf"\b({'|'.join(_NEEDED)}) \.{{3,}} ", line.text) for line in lines):
        raise DataError(
            f"rows={name!r} has Megatron's arguments without the lines 'arguments' and 'end of arguments' around them; "
            "give the whole log"
        )
    batch = steps[-1].batch
    stated = {} if batch is None else {"global_batch": batch}
    return {**stated, "step_time_ms": _time(steps, batch, name)}


def _steps(lines: Sequence[Line]) -> list[Step]:
    found, start = [], 0
    for line in lines:
        start += bool(START.search(line.text))
        for number, unit, time, batch in _STEP.findall(line.text):
            value = float(time.replace(",", "")) * (1e3 if unit == "s" else 1)
            found.append(
                Step(
                    int(number), value, line.rank, start, count(batch, "global batch size") if batch else None
                )
            )
    has_batches = any(step.batch for step in found)
    return [step for step in found if step.batch or not has_batches]


def _time(steps: Sequence[Step], batch: int | None, name: str) -> float:
    """Return the typical time, in milliseconds, of steps with the batch given by the arguments."""
    sessions = sessions_of(steps)
    for one, other in pairwise(sessions):
        if (one[0].rank, one[0].start) == (other[0].rank, other[0].start):
            raise DataError(
                f"rows={name!r} goes back from step {one[-1].number} to {other[0].number}, so it has several runs; "
                "give one file per run"
            )
    others = sorted({step.batch for step in steps if step.batch not in {batch, None}})
    of_batch = [[step for step in session if step.batch in {batch, None}] for session in sessions]
    _check_anew(of_batch, name)
    return typical(of_batch, name, f" with a global batch of {batch}" if others else "")


def _check_anew(sessions: Sequence[Sequence[Step]], name: str) -> None:
    """Reject restarts that repeat steps of the first start at another speed; a resumed job may change its speed."""
    repeated = [
        each for each in sessions if len(each) >= 2 * WARM_UP + 1 and each[0].number <= sessions[0][0].number
    ]
    times = [median(step.value for step in session[WARM_UP:]) for session in repeated]
    if times and max(times) > APART * min(times):
        raise DataError(
            f"rows={name!r} has several runs: steps from {repeated[0][0].number} take {min(times):,.0f} and "
            f"{max(times):,.0f} ms; give one file per run"
        )


def _settings(arguments: Arguments, name: str, given: Transformer | None) -> dict[str, Any]:
    if (old := next((key for key in _UNREADABLE if is_set(arguments, key)), None)) is not None:
        raise SpecError(
            f"rows={name!r} states {old}={arguments[old]}, as {_UNREADABLE[old]}, whose arguments are not read; "
            "give rows of a CSV file"
        )
    lacking = [key for key in _NEEDED if arguments.get(key, "None") in {"None", ""}]
    if lacking:
        raise SpecError(
            f"rows={name!r} states Megatron's arguments without {', '.join(lacking)}; give the whole log"
        )
    for key in _NEEDED:
        count(arguments[key], key)
    check_understood(arguments, name)
    check_given(arguments, name, given)
    return {**model_of(arguments), "seq": int(arguments["seq_length"]), **layout_of(arguments, name)}
