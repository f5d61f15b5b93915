"""Schema of a run's events: the fields of each kind of event and their types.

Logs are external data: they may be truncated, damaged or written by another version. An event is dropped when the log
is read if it lacks a field or if a field's value has the wrong type, so later readers need no checks. Unlisted fields
and kinds are passed on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardscope.errors import RunUnreadable

SCHEMA = 1
"""Version of the events that this version writes, and the newest that it reads. Each log states it in the field
`schema` of its first event. Version 0 denotes logs without that field, which are otherwise the same."""
Check = Callable[[Any], bool]
MOST = 2**53
"""Largest integer that every reader represents exactly."""
MOST_RANKS = 1024
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_LONGEST_NAME = 1000
_LATEST_S = 1e12
"""Latest valid time in Unix seconds, about 30,000 years from now."""


def is_whole(value: Any, most: int = MOST) -> bool:
    """Return whether a value is an integer from 0 to `most`."""
    return type(value) is int and 0 <= value <= most


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return math.isfinite(value) if type(value) is float else type(value) is int and -MOST <= value <= MOST


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, or the name of a non-finite one (see `runlog.writer`)."""
    return is_real(value) or (type(value) is str and value in _NOT_FINITE)


def is_time(value: Any) -> bool:
    """Return whether a value is a time in Unix seconds."""
    return type(value) in (float, int) and 0 <= value <= _LATEST_S


def _is_duration(value: Any) -> bool:
    return type(value) in (float, int) and 0 < value <= _LATEST_S


def _is_there(_value: Any) -> bool:
    """Accept any value; it is checked elsewhere."""
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_layer(value: Any) -> bool:
    return _is_name(value) or is_whole(value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _row(*checks: Check) -> Check:
    """Return a check for a list with one value for each of `checks`."""

    def matches(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(each) for check, each in zip(checks, value, strict=True))
        )

    return matches


def _fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for an object with these fields; optional ones are checked only if present."""
    needed, allowed = tuple(required.items()), tuple((optional or {}).items())

    def matches(value: Any) -> bool:
        if type(value) is not dict:
            return False
        for name, check in needed:  # loops, for speed: they run for every event of every log
            if name not in value or not check(value[name]):
                return False
        for name, check in allowed:  # noqa: SIM110
            if name in value and not check(value[name]):
                return False
        return True

    return matches


def _dict_of(check: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(map(_is_name, value)) and all(map(check, value.values()))
    )


def _are_columns(event: dict[str, Any]) -> bool:
    """Return whether all columns of a layers event have one value for each layer."""
    return len({len(event[name]) for name in ("layer", *_LAYER_COLUMNS, "bound")}) == 1


_is_traffic = _dict_of(
    _fields(
        {"sent_bytes": is_whole, "received_bytes": is_whole},
        {"payload_bytes": is_whole, "calls": is_whole, "messages": is_whole, "sent_to": _dict_of(is_whole)},
    )
)
_is_span = _row(_is_name, _is_name, is_time, is_time, is_whole)
_is_op = _row(_is_name, is_whole, is_whole, is_time, is_time)
_number_or_none = _or_none(_is_number)
_LAYER_COLUMNS = ("ratio", "weight_norm", "update_norm")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""Kinds of a rank's memory; `gathered` are parameters gathered temporarily from other ranks."""
_STEP = {"step": is_whole}

_KINDS: Mapping[str, Check] = {
    "start": _fields(
        {"strategy": _is_name},
        {
            "link": _or_none(_fields({"label": _is_name, "is_accurate": lambda value: isinstance(value, bool)})),
            "backend": _is_name, "role": _or_none(_is_name), "num_params": _or_none(is_whole),
            "gradient_bytes": is_whole, "pid": is_whole,
        },
    ),
    "step": _fields(
        {
            **_STEP, "loss": _number_or_none, "samples": is_whole, "tokens": _or_none(is_whole),
            "step_time_s": _is_duration, "lr": is_real, "grad_norm": _number_or_none, "memory_bytes": is_whole,
            "peak_memory_bytes": is_whole, "traffic": _is_there,
        },
        {
            "spans": _list_of(_is_span), "codec_s": is_real, "skipped": lambda value: isinstance(value, bool | int),
            "noise": _fields({"small_square": _is_number, "large_square": _is_number}),
        },
    ),
    "eval": _fields({**_STEP, "loss": _number_or_none}, {"accuracy": _number_or_none, "split": _is_name}),
    "test": _fields({**_STEP, "loss": _number_or_none}, {"accuracy": _number_or_none}),
    "error": _fields(
        {**_STEP, "type": _is_name, "message": _is_text, "traceback": _is_text},
        {"strategy": _or_none(_is_name)},
    ),
    "process": _fields({"pid": is_whole}, {"started": lambda value: isinstance(value, str | float)}),
    "end": _fields({"state": lambda value: value in ("completed", "stopped")}, {"steps": is_whole}),
    "resume": _fields({**_STEP, "samples": is_whole, "notes": _list_of(_is_text)}),
    "memory": _fields({**_STEP, **dict.fromkeys(MEMORY_KINDS, is_whole)}),
    "layers": _fields(
        {
            **_STEP, "lr": _is_number, "layer": _list_of(_is_layer), "bound": _list_of(_or_none(_is_name)),
            **dict.fromkeys(_LAYER_COLUMNS, _list_of(_number_or_none)),
            "owed": _list_of(_row(_is_name, _is_name, _is_number, _is_number)),
        }
    ),
    "schedule": _fields({**_STEP, "ops": _list_of(_is_op)}),
    "chunk": _fields(
        {
            **dict.fromkeys(("bucket", "round", "chunk", "peer", "bytes"), is_whole), "phase": _is_name,
            "start": is_time, "end": is_time,
        },
        {"step": _or_none(is_whole), "direction": lambda value: type(value) is int and abs(value) == 1},
    ),
    "update": _fields({**_STEP, "server": is_whole, "staleness": _list_of(is_whole)}),
    "traffic": _fields({**_STEP, "traffic": _is_there}),
    "consensus": _fields({**_STEP, "distance": _is_number}),
    "compression": _fields({**_STEP, "figures": lambda value: isinstance(value, dict)}),
}  # fmt: skip


def refuse_newer(event: Any, log: str) -> None:
    """Reject a log with events from a newer version, given one of its events.

    Args:
        event: One event of the log.
        log: Name of the log, for the message.

    Raises:
        RunUnreadable: The version is newer than `SCHEMA`.
    """
    version = event.get("schema") if isinstance(event, dict) else None
    if version is not None and is_whole(version) and version > SCHEMA:
        raise RunUnreadable(
            f"{log} has events of schema version {version}, and this version of Shardscope reads up to {SCHEMA}; "
            "upgrade shardscope to read this run"
        )


def is_readable(event: Any) -> bool:
    """Return whether an event is valid, so that readers can rely on its fields."""
    if not isinstance(event, dict):
        return False
    kind, rank = event.get("event"), event.get("rank")
    if not (is_whole(rank, MOST_RANKS - 1) and is_time(event.get("t"))):
        return False
    if "schema" in event and not is_whole(event["schema"]):
        return False
    if "traffic" in event and not _is_traffic(event["traffic"]):  # counted for events of every kind
        return False
    check = _KINDS.get(kind) if type(kind) is str else None
    if check is None:
        return _is_name(kind)
    return check(event) and (kind != "layers" or _are_columns(event))
