"""Conversion of the arguments of `compression_speedup`: compression methods and bandwidths."""

from __future__ import annotations

from collections.abc import Iterable

from shardscope.errors import SpecError
from shardscope.spec import Compression
from shardscope.spec.units import positive, quantity

USUAL = tuple(
    Compression(name) for name in ("bf16", "int8", "int4", "qsgd", "sign", "topk", "randomblock", "powersgd")
)
"""Compression methods compared by default: at least one of each type."""


def methods_of(methods: Iterable[Compression | str] | Compression | str) -> tuple[Compression, ...]:
    """Return a tuple of compression methods for one or several names or `Compression` objects.

    Raises:
        SpecError: The list is empty, or an item is not a compression method.
    """
    if isinstance(methods, str | Compression):
        return (_method(methods),)
    given = [*methods] if isinstance(methods, Iterable) else []
    if not given:
        raise SpecError(f"methods={methods!r} is empty or not a list; give for example methods=['int8']")
    return tuple(map(_method, given))


def _method(method: object) -> Compression:
    if isinstance(method, Compression):
        return method
    if not isinstance(method, str):
        raise SpecError(
            f"methods contains {method!r}, which is not a compression method; "
            "give names such as 'int8', or Compression(...)"
        )
    return Compression(name=method)


def bandwidth_of(bandwidth: float | str) -> float:
    """Return a bandwidth in bytes per second, from a number in that unit or a text with a unit; it must be above 0.

    Raises:
        SpecError: The value is not a bandwidth, or it is 0.
    """
    return positive(quantity(bandwidth, "bytes/s", field="bandwidth"), field="bandwidth", given=bandwidth)


def refuse_unsteady(compression: Compression) -> None:
    """Reject a method whose exchange differs between steps, since the prediction is for a single step.

    Raises:
        SpecError: The exchange differs between steps.
    """
    if not compression.is_fixed:
        raise SpecError(
            f"compression={compression.name!r} sends different data in different steps, so no single step can be "
            f"predicted; use for example {', '.join(method.name for method in USUAL)}"
        )
    if compression.at_step(1) != compression:
        raise SpecError(
            f"compression={compression.label!r} sends different data while it warms up, so no single step can be "
            "predicted; use warmup_steps=0 to predict the steps after the warm-up"
        )
