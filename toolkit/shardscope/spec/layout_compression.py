"""Compression in layouts: the compression methods whose cost is known in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.compression import Compression

FORMER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"topk-1%": {"name": "topk", "ratio": 0.01}, "powersgd-4": {"name": "powersgd", "rank": 4}}
)
"""Names that layouts of earlier versions used, and the methods that they denote."""


def compression_names() -> tuple[str, ...]:
    """Return the names of all methods that a layout accepts, ``none`` first."""
    known = [method for method in registry.all_of(Compression) if method.codec_passes is not None]
    return tuple(method.name for method in sorted(known, key=lambda method: method.is_on))


def layout_compression(value: Any) -> Compression:
    """Convert the value of a layout's `compression` field to a method. It may be a method, a class, a name, or JSON.

    Raises:
        SpecError: There is no such method, or its class does not state `codec_passes`.

    Example:
        >>> layout_compression("powersgd-4").label, layout_compression("topk") == layout_compression("topk-1%")
        ('powersgd', True)
    """
    former = FORMER.get(value) if isinstance(value, str) else None
    found: Compression = Compression.resolve(dict(former) if former else value)
    if found.is_here and found.codec_passes is None:
        raise SpecError(
            f"compression={found.name!r} does not state how often packing reads or writes the gradient, which "
            f"is needed to time a layout; set codec_passes in its class, or use one of {', '.join(compression_names())}"
        )
    return found


AnyLayoutCompression = Annotated[SerializeAsAny[Compression], BeforeValidator(layout_compression)]
"""A field that accepts a compression method, its name, its class, its JSON, or a name in `FORMER`."""
