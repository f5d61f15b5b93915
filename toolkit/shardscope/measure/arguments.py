"""Arguments of `break_even` and `compression_speedup`: one value or several, as numbers or texts with units."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from shardscope.errors import SpecError
from shardscope.spec import Compression, Link
from shardscope.spec.units import positive, quantity


def methods_of(methods: Iterable[Compression | str] | Compression | str) -> tuple[Compression, ...]:
    """One compression method or several, by their names or with their settings.

    Raises:
        SpecError: The list is empty, or an item is not a compression method.
    """
    given = [methods] if isinstance(methods, str | Compression) else _several("methods", methods, "'int8'")
    return tuple(map(_method, given))


def _method(method: object) -> Compression:
    if isinstance(method, Compression):
        return method
    if not isinstance(method, str):
        raise SpecError(
            f"methods holds {method!r}, which is not a compressor; give names such as 'int8', or Compression(...)"
        )
    return Compression(name=method)


def workers_of(workers: Iterable[int] | int) -> tuple[int, ...]:
    """One number of workers or several, each 2 or more.

    Raises:
        SpecError: The list is empty, or an item is not an integer of 2 or more.
    """
    given = [workers] if isinstance(workers, Integral) else _several("workers", workers, "4")
    return tuple(whole("workers", count, 2) for count in given)


def whole(field: str, value: object, least: int) -> int:
    """An integer of at least `least`.

    Raises:
        SpecError: The value is not an integer, or it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise SpecError(f"{field}={value!r} is not valid: it should be a whole number of {least} or more")
    return int(value)


def link_of(link: Link | str | None) -> Link | None:
    """A link, or a link from the catalogue by its name.

    Raises:
        SpecError: There is no link of that name, or the text is a rate, which needs a latency.
    """
    if link is None or isinstance(link, Link):
        return link
    if not isinstance(link, str):
        raise SpecError(
            f"link={link!r} is not a link; give Link(bandwidth='1 Gbit/s', latency='1 ms') or the like"
        )
    return Link.of(link)


def latency_of(latency: float | str) -> float:
    """A latency in seconds; 0 or more."""
    return quantity(latency, "s", field="latency_s")


def bandwidth_of(bandwidth: float | str) -> float:
    """A bandwidth in bytes per second; above 0.

    Raises:
        SpecError: The value is not a bandwidth, or it is 0.
    """
    return positive(quantity(bandwidth, "bytes/s", field="bandwidth"), field="bandwidth", given=bandwidth)


def _several(field: str, given: object, example: str) -> list[object]:
    found = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not found:
        raise SpecError(f"{field}={given!r} names nothing to look at; give for example {field}=[{example}]")
    return found
