"""What the catalogue knows of an algorithm."""

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
    """A setting that an algorithm has besides the message and the link.

    Attributes:
        default: Its value if it is not given; None lets the algorithm choose.
        help: What it is, with its unit.
        least: The smallest value allowed.
        is_whole: Whether it is a count.
        is_open: Whether `least` itself is not allowed.
        is_price: Whether it says what a phase takes rather than what it moves.
    """

    default: float | bool | None
    help: str
    least: float = 0.0
    is_whole: bool = True
    is_open: bool = False
    is_price: bool = False


@dataclass(frozen=True)
class Algorithm:
    """One way to do one or more operations.

    Attributes:
        title: As in a legend.
        since: When it came into use or print.
        source: Where its formulas come from.
        about: Who sends what to whom, in a sentence or two.
        costs: By operation, the function from a `Message` and the options to a `Cost`.
        formulas: By operation, the time as in a paper: S bytes, W workers, α latency, B bandwidth, γ additions.
        options: By name.
    """

    title: str
    since: int
    source: str
    about: str
    costs: Mapping[str, Callable[..., Cost]]
    formulas: Mapping[str, str]
    options: Mapping[str, Option] = field(default_factory=dict)

    def cost(self, op: str, message: Any, **options: Any) -> Cost:
        """The cost of an operation; options that are not given take their defaults."""
        defaults = {name: option.default for name, option in self.options.items() if not option.is_price}
        return self.costs[op](message, **(defaults | options))
