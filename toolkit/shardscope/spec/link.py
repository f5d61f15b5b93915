"""Links between the devices of a cluster, and the emulated link of the ranks of a real run.

All rates are in bytes per second, all times in seconds.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.numbers import require_plausible
from shardscope.spec.units import Bandwidth, Seconds, bit_rate_text, parse, positive, quantity, seconds_text

PACED_UP_TO = 5e9 / 8
"""Highest bandwidth, in bytes per second, that a process can emulate precisely by pacing its messages. Emulation of a
faster link would be too slow, because copying a message within the machine takes about as long as sending it would."""
_FIGURES = (
    ("bandwidth", "the bandwidth", "such as '100 Mbit/s'"),
    ("latency_s", "the latency", "such as '1 ms', or 0 for none"),
)


class Link(Spec):
    """A link between devices. Quantities may be strings with units: ``"200 Gbit/s"``, ``"5 us"``.

    Example:
        >>> Link(bandwidth="100 Mbit/s", latency="1 ms").label
        '100 Mbit/s, 1 ms'
    """

    name: str = ""
    """Name in the catalogue, or the text that the user gave."""
    bandwidth: Bandwidth
    """Bytes per second that one device can send while it receives at the same rate (per device, one direction)."""
    latency_s: Seconds
    """Latency of one message between neighbours, in seconds. May be given as `latency`."""
    source: str = Field(default="given by the user", min_length=1)
    """Publication or page that states the values."""
    recalled: tuple[str, ...] = ()
    """Fields whose values were written from memory and not confirmed in the source."""

    @model_validator(mode="before")
    @classmethod
    def _require_both(cls, fields: Any) -> Any:
        """Require a bandwidth and a latency; parse `latency` here, so that errors use the name that the user wrote."""
        if not isinstance(fields, dict):
            return fields
        if "latency" in fields:
            if "latency_s" in fields:
                raise SpecError(
                    "Link: the latency is given twice, as latency and as latency_s; give one of them"
                )
            latency = quantity(fields["latency"], "s", field="latency")
            fields = {
                **{name: value for name, value in fields.items() if name != "latency"},
                "latency_s": latency,
            }
        for field, figure, example in _FIGURES:
            if field not in fields:
                raise SpecError(f"a link needs a bandwidth and a latency; give {figure} as well, {example}")
        return fields

    @field_validator("bandwidth", "latency_s")
    @classmethod
    def _finite(cls, value: float, info: ValidationInfo) -> float:
        if math.isinf(value):
            raise SpecError(f"{info.field_name}={quoted(value)} is not valid: it should be a finite number")
        require_plausible({str(info.field_name): value})
        return value

    @classmethod
    def of(cls, name: str, *, latency_s: float | str | None = None, field: str = "link") -> Link:
        """Return a link from the catalogue by its name, or a new link with the given bandwidth and latency.

        For network ports, the bandwidth is per port and direction; `shared` converts it to a device's share.

        Args:
            name: A name such as ``"nvlink-4"`` or ``"25GbE"``, or the bandwidth in one direction with its unit.
            latency_s: Latency in seconds, or a string with a unit; None for the catalogue's latency. A bandwidth
                requires a latency.
            field: Name of the argument in error messages.

        Example:
            >>> Link.of("25GbE").bandwidth
            3125000000.0
            >>> Link.of("200 Gbit/s", latency_s="5 us").bandwidth
            25000000000.0
        """
        if not is_rate(name):
            proper, fields = catalogue.lookup("links", name, field=field)
            link = cls(name=proper, **fields)
            return link if latency_s is None else link.replace(latency_s=latency_s)
        bandwidth = positive(parse(name, "bytes/s", field=field), field=field, given=name)
        if latency_s is None:
            raise SpecError(
                f"{field}={quoted(name)} is a bandwidth, which needs a latency; give for example latency_s='5 us', or 0"
            )
        return cls(name=name, bandwidth=bandwidth, latency_s=latency_s)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names in the catalogue."""
        return tuple(catalogue.table("links"))

    @property
    def label(self) -> str:
        """Bandwidth and latency as text: ``100 Mbit/s, 1 ms``."""
        return f"{bit_rate_text(self.bandwidth)}, {seconds_text(self.latency_s)}"

    @property
    def is_pcie(self) -> bool:
        """Whether the link is PCI Express by its name; devices then reach each other through the host's bridges."""
        return self.name.startswith("pcie")

    @property
    def can_be_paced(self) -> bool:
        """Whether a run can emulate the link precisely, which is possible up to 5 Gbit/s."""
        return self.bandwidth <= PACED_UP_TO

    def shared(self, ports: int, devices: int) -> Link:
        """Return the link of each device if `devices` devices share `ports` ports, each with this link's bandwidth."""
        for field, count in (("ports", ports), ("devices", devices)):
            if count < 1:
                raise SpecError(f"{field}={count} is not valid: it should be 1 or more")
        if ports == devices:
            return self
        name = f"{ports} x {self.name or self.label} / {devices}"
        return self.replace(name=name, bandwidth=self.bandwidth * ports / devices)


def is_rate(name: object) -> bool:
    """Return whether a link is given by its bandwidth (``"200 Gbit/s"``) rather than by its name (``"25GbE"``)."""
    return (
        isinstance(name, str)
        and name.strip()[:1] in set("+-.0123456789")
        and not catalogue.has("links", name)
    )


LinkOrName = Annotated[
    Link, BeforeValidator(lambda value: Link.of(value) if isinstance(value, str) else value)
]
"""A field that accepts a link, or the name of a link in the catalogue."""
