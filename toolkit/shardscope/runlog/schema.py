"""Schema of a run's events: the fields of each kind of event and their types.

Logs are external data: they may be truncated, damaged or written by a different version of Shardscope. An event that
lacks a field, or has a field of the wrong type, is dropped when the log is read, so code that uses events needs no
further checks. Unknown fields and unknown kinds of events are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardscope.errors import RunUnreadable
from shardscope.runlog.files import is_real, is_whole

SCHEMA = 1
"""Schema version of the events that this version of Shardscope writes, and the newest that it can read. The first event
of each log states the schema version in its field `schema`. Logs without this field count as schema version 0, which is
otherwise the same as version 1."""
Check = Callable[[Any], bool]
MOST_RANKS = 2**20
"""Largest number of ranks of a run, equal to `spec.numbers.LARGEST_DEGREE`."""
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_LONGEST_NAME = 1000
_LATEST_S = 1e12
"""Latest valid time in Unix seconds, about 30,000 years from now."""


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number, or the name of a non-finite one (see `runlog.writer`)."""
    return is_real(value) or (type(value) is str and value in _NOT_FINITE)


def is_time(value: Any) -> bool:
    """Return whether a value is a time in Unix seconds."""
    return type(value) in (float, int) and 0 <= value <= _LATEST_S


def _is_duration(value: Any) -> bool:
    return type(value) in (float, int) and 0 < value <= _LATEST_S


def _any_value(_value: Any) -> bool:
    """Accept any value, for fields that `is_readable` checks separately."""
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
    """Return a check for a list that has one value for each of `checks`, in order."""

    def matches(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(each) for check, each in zip(checks, value, strict=True))
        )

    return matches


def _fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check for a JSON object that has all `required` fields; `optional` fields are checked if present."""
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
    """Return whether all columns of a layer event have one value for each layer."""
    return len({len(event[name]) for name in ("layer", *_LAYER_COLUMNS, "bound")}) == 1


def _are_loads(event: dict[str, Any]) -> bool:
    """Return whether an experts event has one row for each layer, and one number for each expert."""
    rows = [row for name in ("assigned", "dropped") for row in event[name]]
    layers = {len(event[name]) for name in ("layers", "balances", "assigned", "dropped")}
    return len(layers) == 1 and len({*map(len, rows)}) == 1 and all(rows)


_is_traffic = _dict_of(
    _fields(
        {"sent_bytes": is_whole, "received_bytes": is_whole},
        {"payload_bytes": is_whole, "calls": is_whole, "messages": is_whole, "sent_to": _dict_of(is_whole)},
    )
)
_is_span = _row(_is_name, _is_name, is_time, is_time, is_whole)
_is_message = _row(
    _is_name, lambda way: way in ("sent", "arrived"), is_whole, is_whole, is_time, _is_name, _is_name
)
_is_op = _row(_is_name, is_whole, is_whole, is_time, is_time)
_number_or_none = _or_none(_is_number)
_LAYER_COLUMNS = ("ratio", "weight_norm", "update_norm")
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")
"""Types of memory on a rank; ``gathered`` means parameters that are gathered temporarily from other ranks."""
_STEP = {"step": is_whole}

_KINDS: Mapping[str, Check] = {
    "start": _fields(
        {"strategy": _is_name},
        {
            "link": _or_none(_fields({"label": _is_name, "is_accurate": lambda value: isinstance(value, bool)})),
            "backend": _is_name, "transport": _is_name, "transport_reason": _is_name, "role": _or_none(_is_name),
            "mixes_samples": _list_of(_is_name), "draws": _list_of(_is_name), "num_params": _or_none(is_whole),
            "gradient_bytes": is_whole, "pid": is_whole,
            "world_size": lambda value: is_whole(value, MOST_RANKS) and value > 0,
        },
    ),
    "step": _fields(
        {
            **_STEP, "loss": _number_or_none, "samples": is_whole, "tokens": _or_none(is_whole),
            "step_time_s": _is_duration, "lr": _or_none(is_real), "grad_norm": _number_or_none,
            "memory_bytes": is_whole, "peak_memory_bytes": is_whole, "traffic": _any_value,
        },
        {
            "spans": _list_of(_is_span), "codec_s": is_real, "late_s": is_real,
            "skipped": lambda value: isinstance(value, bool | int), "dropped": lambda value: isinstance(value, bool),
            "waited": _dict_of(is_real), "epoch": is_whole,
            "shards": _list_of(_row(is_whole, is_whole, is_whole, is_whole)),
            "gradients": is_whole, "noise": _fields({"small_square": _is_number, "large_square": _is_number}),
        },
    ),
    "eval": _fields({**_STEP, "loss": _number_or_none}, {"accuracy": _number_or_none, "split": _is_name}),
    "test": _fields({**_STEP, "loss": _number_or_none}, {"accuracy": _number_or_none}),
    "error": _fields(
        {**_STEP, "type": _is_name, "message": _is_text, "traceback": _is_text},
        {"strategy": _or_none(_is_name)},
    ),
    "process": _fields(
        {"pid": is_whole},
        {"started": lambda value: isinstance(value, str | float), "at_peak": _dict_of(is_real)},
    ),
    "end": _fields({"state": lambda value: value in ("completed", "stopped")}, {"steps": is_whole, "reason": _is_text}),
    "resize": _fields(
        {**_STEP, "before": is_whole, "world_size": is_whole, "global_batch": is_whole}, {"source": _is_name}
    ),
    "resume": _fields({**_STEP, "samples": is_whole, "notes": _list_of(_is_text)}, {"source": _is_name}),
    "checkpoint": _fields(
        {**_STEP, "path": _is_name, "seconds": is_real}, {"blocked_s": is_real, "bytes": is_whole}
    ),
    "pipeline_layers": _fields({"count": is_whole}, {"split": _list_of(is_whole)}),
    "replica": _fields({**_STEP, "path": _is_name, "seconds": is_real}, {"bytes": is_whole}),
    "not_handed_over": _fields({**_STEP, "reason": _is_text}),
    "checkpoint_interval": _fields({**_STEP, "every": is_whole, "save_s": is_real, "step_s": is_real}),
    "memory": _fields(
        {**_STEP, **dict.fromkeys(MEMORY_KINDS, is_whole)},
        {"peak": is_whole, "curve": _list_of(_row(is_time, *[is_whole] * len(MEMORY_KINDS)))},
    ),
    "messages": _fields({**_STEP, "rows": _list_of(_is_message)}),
    "layers": _fields(
        {
            **_STEP, "lr": _is_number, "layer": _list_of(_is_layer), "bound": _list_of(_or_none(_is_name)),
            **dict.fromkeys(_LAYER_COLUMNS, _list_of(_number_or_none)),
            "owed": _list_of(_row(_is_name, _is_name, _is_number, _is_number)),
        }
    ),
    "experts": _fields(
        {
            **_STEP, "layers": _list_of(_is_name), "sequences": is_whole, "balances": _list_of(_is_number),
            **dict.fromkeys(("assigned", "dropped"), _list_of(_list_of(is_whole))),
        }
    ),
    "schedule": _fields({**_STEP, "ops": _list_of(_is_op)}),
    "update": _fields({**_STEP, "server": is_whole, "staleness": _list_of(is_whole)}),
    "shares": _fields({**_STEP, "samples": _list_of(is_whole), "seconds_per_sample": _list_of(is_real)}),
    "loss_note": _fields({**_STEP, "text": _is_text}),
    "optimizer_note": _fields({**_STEP, "text": _is_text}),
    "traffic": _fields({**_STEP, "traffic": _any_value}),
    "consensus": _fields({**_STEP, "distance": _is_number}),
    "fault": _fields({**_STEP, "kind": _is_name, "text": _is_text}, {"number": is_whole}),
    "restart": _fields(
        {**_STEP, "attempt": is_whole, "cause": _is_text, "source": _is_name},
        {
            "failed_rank": _or_none(is_whole), "failed_step": _or_none(is_whole), "failed_t": is_time,
            "world_size": is_whole,
        },
    ),
    "compression": _fields({**_STEP, "figures": lambda value: isinstance(value, dict)}),
}  # fmt: skip
_COLUMNS: Mapping[str, Check] = {"layers": _are_columns, "experts": _are_loads}
"""Checks that fields of an event have equal lengths, by kind of event."""


def refuse_newer(event: Any, log: str) -> None:
    """Raise an error if an event states that its log uses a newer schema than `SCHEMA`.

    Args:
        event: One event of the log.
        log: Name of the log, for the error message.

    Raises:
        RunUnreadable: The schema is newer.
    """
    version = event.get("schema") if isinstance(event, dict) else None
    if version is not None and is_whole(version) and version > SCHEMA:
        raise RunUnreadable(
            f"{log} has events of schema version {version}, but this version of Shardscope reads only up to {SCHEMA}; "
            "upgrade shardscope to read this run"
        )


def is_readable(event: Any) -> bool:
    """Return whether an event has a valid rank and time, and valid values in all fields that its kind requires."""
    if not isinstance(event, dict):
        return False
    kind, rank = event.get("event"), event.get("rank")
    if not (is_whole(rank, MOST_RANKS - 1) and is_time(event.get("t"))):
        return False
    if "schema" in event and not is_whole(event["schema"]):
        return False
    if "traffic" in event and not _is_traffic(event["traffic"]):  # events of any kind may report traffic
        return False
    check = _KINDS.get(kind) if type(kind) is str else None
    if check is None:
        return _is_name(kind)
    return check(event) and _COLUMNS.get(str(kind), _any_value)(event)


Event = Mapping[str, Any]
OBSERVING = frozenset({"noise_scale", "consensus", "target_counts"})
"""Names, in the traffic of events, of the collectives that are not part of a job's predicted bytes: measurements, and
target counts, which are two numbers per step and depend on the data."""


@dataclass(slots=True)
class Moved:
    """Amount of training traffic of one or several ranks: sent bytes, received bytes and messages."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    @classmethod
    def of(cls, event: Event) -> Self:
        """Return the training traffic of one event."""
        moved = cls()
        for name, row in event["traffic"].items():
            if name not in OBSERVING:
                moved.add(row)
        return moved

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the traffic of one collective, given as the counts in an event."""
        self.sent_bytes += row["sent_bytes"]
        self.received_bytes += row["received_bytes"]
        self.messages += row.get("messages", 0)
