"""Quantities with units: parsed strictly from text, and formatted as text.

A plain number is in the base unit of its field (bytes, bytes per second, FLOP/s, seconds, watts).
A string must state its unit: ``"80 GiB"``, ``"200 Gbit/s"``, ``"25 GB/s"``, ``"312 TFLOP/s"``, ``"5 us"``. Only zero
needs no unit. ``kB``, ``MB``, ``GB`` are powers of 1000, and ``KiB``, ``MiB``, ``GiB`` are powers of 1024; a byte has
8 bits.

Both traffic and memory are shown in units of 1000 (`bytes_text`), so that all values on a screen have the same family
of units. Memory that is compared with the capacity of a device, as in the planner and the memory calculator, is in GiB.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, get_args

from pydantic import AllowInfNan, BeforeValidator, NonNegativeFloat, PositiveFloat, ValidationInfo

from shardscope.errors import SpecError, quoted

Kind = Literal["bytes", "bytes/s", "FLOP/s", "s", "W"]

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZES = {
    **{f"{prefix}B": float(factor) for prefix, factor in (_DECIMAL | _BINARY).items()},
    **{f"{prefix}bit": factor / 8 for prefix, factor in (_DECIMAL | _BINARY).items()},
}
_UNITS: Mapping[Kind, Mapping[str, float]] = {
    "bytes": _SIZES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _SIZES.items()},
    "FLOP/s": {f"{prefix}FLOP/s": float(factor) for prefix, factor in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    "W": {"mW": 1e-3, "W": 1.0, "kW": 1e3, "MW": 1e6},
}
_EXAMPLES: Mapping[Kind, str] = {
    "bytes": "'80 GiB' or '80 GB'",
    "bytes/s": "'25 GB/s' or '200 Gbit/s'",
    "FLOP/s": "'312 TFLOP/s'",
    "s": "'5 us' or '1.5 ms'",
    "W": "'400 W'",
}
_IN_WORDS = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
}
"""Symbol to write instead of each spelled-out unit of time."""
_BASE: Mapping[Kind, str] = {
    "bytes": "bytes",
    "bytes/s": "bytes per second",
    "FLOP/s": "FLOP per second",
    "s": "seconds",
    "W": "watts",
}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def parse(text: str, kind: Kind, *, field: str = "value") -> float:
    """Parse a quantity with a unit, and return it in the base unit of its kind.

    Args:
        text: For example ``"200 Gbit/s"``.
        kind: Kind of the quantity: ``bytes``, ``bytes/s``, ``FLOP/s``, ``s`` or ``W``.
        field: Name of the value in error messages.

    Raises:
        SpecError: The text has no number, no unit, or an ambiguous unit (``G``, ``Gb``, ``Gbps``).

    Example:
        >>> parse("200 Gbit/s", "bytes/s")
        25000000000.0
    """
    assert kind in get_args(Kind), kind
    match = _NUMBER.match(text.strip())
    if match is None:
        raise SpecError(
            f"{field}={quoted(text)} is not a quantity; write a number and its unit, such as {_EXAMPLES[kind]}"
        )
    number, unit = match[0], match.string[match.end() :].strip()
    if not unit and not float(number.replace("_", "")):
        return 0.0
    if not unit:
        raise SpecError(
            f"{field}={quoted(text)} has no unit; write {_EXAMPLES[kind]}, or in Python a plain number of {_BASE[kind]}"
        )
    factor = _UNITS[kind].get(unit)
    if factor is None:
        raise SpecError(f"{field}={quoted(text)} has the unit {quoted(unit)}, which {_complaint(unit, kind)}")
    return float(number.replace("_", "")) * factor


def quantity(value: object, kind: Kind, *, field: str) -> float:
    """Return the value of an argument, given in the base unit or as a string with a unit; it must be finite and >= 0.

    Raises:
        SpecError: The value is not a quantity, or it is negative or infinite.

    Example:
        >>> quantity("1.5 ms", "s", field="latency_s"), quantity(0, "s", field="latency_s")
        (0.0015, 0.0)
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SpecError(
            f"{field}={quoted(value)} is not a quantity; write {_EXAMPLES[kind]}, or give {_BASE[kind]}"
        )
    try:
        number = parse(value, kind, field=field) if isinstance(value, str) else float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise SpecError(f"{field}={quoted(value)} is not valid: it should be finite, and 0 or more")
    return number


def positive(value: float, *, field: str, given: object) -> float:
    """Return the value if it is above zero.

    Raises:
        SpecError: The value is not above zero.
    """
    if not value > 0:
        raise SpecError(f"{field}={quoted(given)} is not valid: it should be greater than 0")
    return value


def _complaint(unit: str, kind: Kind) -> str:
    """Return why a unit is rejected, and which unit to write instead."""
    if kind == "bytes/s" and unit in _SIZES:
        return f"is a size, not a rate; write {unit}/s"
    if kind == "bytes" and unit in _UNITS["bytes/s"]:
        return f"is a rate, not a size; write {unit.removesuffix('/s')}"
    if kind in {"bytes", "bytes/s"}:
        rate = "/s" if kind == "bytes/s" else ""
        prefix = re.match(r"[kKMGTP]?i?", unit)
        start = prefix[0].replace("K", "k").replace("ki", "Ki") if prefix else ""
        rest = unit[len(prefix[0]) :] if prefix else unit
        if rest.lower() in {"", "b", "b/s", "bps", "/s", "bit", "bits", "bits/s", "byte", "bytes", "bytes/s"}:
            return f"could mean bits or bytes; write {start}bit{rate} or {start}B{rate}"
    if kind == "s" and unit.lower() in _IN_WORDS:
        return f"is not a unit for seconds; write {_IN_WORDS[unit.lower()]}, such as '6 {_IN_WORDS[unit.lower()]}'"
    return f"is not a unit for {_BASE[kind]}; write {_EXAMPLES[kind]}"


@dataclass(frozen=True)
class Reader:
    """Validator that reads a quantity from text with a unit; other values are left to the next validator."""

    kind: Kind

    def __call__(self, value: object, info: ValidationInfo) -> object:
        """Return the quantity in its base unit."""
        return parse(value, self.kind, field=info.field_name or "value") if isinstance(value, str) else value


_FINITE = AllowInfNan(False)
"""Quantities must be finite, because JSON cannot store infinity; give an ideal link a very large bandwidth instead."""

Bytes = Annotated[PositiveFloat, _FINITE, BeforeValidator(Reader("bytes"))]
BytesOrNone = Annotated[NonNegativeFloat, _FINITE, BeforeValidator(Reader("bytes"))]
"""A number of bytes that may be 0."""
Bandwidth = Annotated[PositiveFloat, _FINITE, BeforeValidator(Reader("bytes/s"))]
BandwidthOrNone = Annotated[NonNegativeFloat, _FINITE, BeforeValidator(Reader("bytes/s"))]
Flops = Annotated[PositiveFloat, _FINITE, BeforeValidator(Reader("FLOP/s"))]
Seconds = Annotated[NonNegativeFloat, _FINITE, BeforeValidator(Reader("s"))]
Watts = Annotated[PositiveFloat, _FINITE, BeforeValidator(Reader("W"))]


_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {f"{prefix}B": 1e3**power for power, prefix in reversed([*enumerate(("", "k", "M", "G", "T"))])}
_BINARY_BYTES = {
    f"{prefix}B": 1024.0**power for power, prefix in reversed([*enumerate(("", "Ki", "Mi", "Gi", "Ti"))])
}
_BIT_RATES = {f"{prefix}bit/s": float(factor) for prefix, factor in reversed(_DECIMAL.items())}
_FLOPS = {f"{prefix}FLOP/s": float(factor) for prefix, factor in reversed(_DECIMAL.items())}


def three_digits(value: float) -> str:
    """Format a number with three significant digits, as ``12.3`` or ``0.0123``; from 100 on as an integer, ``1234``."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def scaled(value: float, sizes: Mapping[str, float]) -> str:
    """Format a value with three digits in the largest unit that is not larger than the value, else in the smallest.

    Args:
        value: The value in the base unit.
        sizes: Size of each unit in base units, largest first; the unit ``""`` is not shown.
    """
    rounded = float(f"{abs(value):.3g}")  # 999.9 ms are 1 s
    unit, size = "", 1.0
    for unit, size in sizes.items():  # noqa: B007 - the last one checked is the unit
        if rounded >= size:
            break
    return f"{three_digits(value / size)} {unit}".rstrip()


@lru_cache(maxsize=4096)  # a panel prints the same sizes for most stages, at every move of a slider
def gib_text(num_bytes: float) -> str:
    """Format a number of bytes with units of 1024, as for memory: ``79.2 GiB``."""
    return scaled(float(f"{num_bytes:.0f}"), _BINARY_BYTES)


def bytes_text(num_bytes: float) -> str:
    """Format a number of bytes with units of 1000, as for network traffic: ``1.5 MB``."""
    return scaled(float(f"{num_bytes:.0f}"), _BYTES)


def bit_rate_text(bytes_per_s: float) -> str:
    """Format bytes per second as bits per second, as for networks: ``100 Mbit/s``."""
    return scaled(8 * bytes_per_s, _BIT_RATES)


def flops_text(flops: float) -> str:
    """Format a rate of computation, in FLOP/s, as ``2 GFLOP/s``."""
    return scaled(flops, _FLOPS)


def plural(count: int, thing: str) -> str:
    """Format a count with its noun: ``1 rank``, ``4 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def faster_text(speed_up: float) -> str:
    """Format a speed-up: ``2.4 times faster``, ``38% faster`` or, for 1 / 1.38, ``38% slower``."""
    factor, word = (speed_up, "faster") if speed_up >= 1 else (1 / speed_up, "slower")
    if factor >= 2:
        return f"{float(f'{factor:.2g}'):g} times {word}"
    return f"{'less than 1%' if factor < 1.005 else f'{factor - 1:.0%}'} {word}"


def work_text(global_batch: int, seq: int | None = None) -> str:
    """Return the batch and the sequence length of a step as text, for the first line of every prediction and plan.

    Args:
        global_batch: Samples or sequences in a step, over all ranks.
        seq: Tokens in a sequence; None if samples are not sequences, or if the length is unknown.

    Example:
        >>> work_text(1536, 2048)
        'global batch 1,536, sequence length 2,048'
    """
    return f"global batch {global_batch:,}" + ("" if seq is None else f", sequence length {seq:,}")


def listed(items: Iterable[str]) -> str:
    """Join items as ``a``, ``a and b`` or ``a, b and c``."""
    names = list(items)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def seconds_text(seconds: float) -> str:
    """Format seconds in one unit that `parse` accepts: ``1.5 ms``."""
    return scaled(seconds, _SECONDS) if seconds else "0 s"


_HOUR_S = 3600.0
_DURATIONS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def duration_text(seconds: float) -> str:
    """Format a duration as ``820 µs``, ``12.3 ms``, ``1.2 s``, ``2 min 5 s`` or ``6 h``; in hours from 2 h on."""
    if seconds >= 2 * _HOUR_S:
        return f"{three_digits(seconds / _HOUR_S)} h"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return scaled(seconds, _DURATIONS)


def rate_text(per_second: float, thing: str) -> str:
    """Format a rate as ``31.2 k tokens/s``."""
    if per_second >= 1e6:
        return f"{three_digits(per_second / 1e6)} M {thing}/s"
    if per_second >= 1e4:
        return f"{three_digits(per_second / 1e3)} k {thing}/s"
    return f"{three_digits(per_second)} {thing}/s"


_STEPS = {
    "s": ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "GiB": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "B")),
    "FLOP": ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")),
}  # fmt: skip


def suitable_unit(value: float, unit: str) -> tuple[float, str]:
    """Return the size and the name of a readable unit for a value, such as ``(0.001, "ms")`` for 0.02 s.

    Bytes have units of 1000, unless `unit` is ``GiB``, for memory next to the capacity of a device.
    """
    return next((step for step in _STEPS.get(unit, ()) if abs(value) >= step[0]), (1.0, unit))


def figure(value: float, unit: str) -> str:
    """Format a value with three digits and a suitable unit, such as ``18.1 s`` or ``1.25 GB``."""
    size, name = suitable_unit(value, unit)
    return f"{three_digits(value / size)} {name}"
