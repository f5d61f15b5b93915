"""Compression in layouts: the compression methods whose time has a closed form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.errors import SpecError
from shardscope.spec import registry
from shardscope.spec.compression import Compression


def compression_names() -> tuple[str, ...]:
    """Return the names of all methods that a layout accepts, ``none`` first."""
    known = [method for method in registry.all_of(Compression) if method.codec_passes is not None]
    return tuple(method.name for method in sorted(known, key=lambda method: method.is_on))


def layout_compression(value: Any) -> Compression:
    """Convert a layout's `compression` field (a method, class, name or JSON) to a compression method.

    Raises:
        SpecError: The method does not exist, or its class does not state `codec_passes`.

    Example:
        >>> layout_compression("powersgd").rank
        4
    """
    found: Compression = Compression.resolve(value)
    if found.is_here and found.codec_passes is None:
        raise SpecError(
            f"compression={found.name!r} does not state how often packing reads or writes the gradient, which is "
            f"needed to predict the step time; set codec_passes in its class, or use one of "
            f"{', '.join(compression_names())}"
        )
    return found


AnyLayoutCompression = Annotated[SerializeAsAny[Compression], BeforeValidator(layout_compression)]
"""A field that accepts a compression method, its name, its class, or its JSON."""
