"""Entries of the catalogue of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardscope.analytic.communication.cost import Cost

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
)


@dataclass(frozen=True)
class Option:
    """An option of an algorithm, in addition to the message and the link.

    Attributes:
        default: Default value; None lets the algorithm choose.
        help: Description, with the unit.
        least: Smallest value allowed.
        is_whole: Whether the value must be an integer.
        is_open: Whether `least` itself is excluded.
        is_price: Whether it changes only the time of a phase, not the bytes that the phase moves.
    """

    default: float | bool | None
    help: str
    least: float = 0.0
    is_whole: bool = True
    is_open: bool = False
    is_price: bool = False


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for one or more collective operations.

    Attributes:
        title: Name in a legend.
        since: Year of first use or publication.
        source: Source of its formulas.
        about: Which worker sends what to which, in a sentence or two.
        costs: Function from a `CollectiveInput` and the options to a `Cost`, by operation.
        formulas: Formula for the time, by operation: S bytes, W workers, α latency, B bandwidth, γ rate of additions.
        options: Options by name.
    """

    title: str
    since: int
    source: str
    about: str
    costs: Mapping[str, Callable[..., Cost]]
    formulas: Mapping[str, str]
    options: Mapping[str, Option] = field(default_factory=dict)

    def cost(self, op: str, message: Any, **options: Any) -> Cost:
        """Return the cost of an operation; options that are not given take their defaults."""
        defaults = {name: option.default for name, option in self.options.items() if not option.is_price}
        return self.costs[op](message, **(defaults | options))
