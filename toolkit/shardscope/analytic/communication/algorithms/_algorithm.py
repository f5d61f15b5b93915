"""`Algorithm` and `Option`, the entries in the catalogue of collective algorithms."""

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
"""All collective operations by name."""


@dataclass(frozen=True)
class Option:
    """An option of a collective algorithm, such as the number of segments.

    Attributes:
        default: Default value; None lets the algorithm choose.
        help: Description, with the unit.
        least: Minimum value.
        is_whole: Whether the value must be an integer.
        is_open: Whether the value must be above `least`, instead of at least `least`.
        is_time_only: Whether the option affects only the time of a phase, not the bytes that it moves.
    """

    default: float | bool | None
    help: str
    least: float = 0.0
    is_whole: bool = True
    is_open: bool = False
    is_time_only: bool = False


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for one or more collective operations.

    Attributes:
        title: Name in a legend.
        since: Year of first use or publication.
        source: Publication or software from which the formulas are taken.
        about: Description in one or two sentences: which ranks send what to which ranks.
        costs: For each collective operation, a function from a `CollectiveInput` and the options to a `Cost`.
        formulas: For each operation, the formula for its time, with S the tensor's size in bytes, W the number of
            workers, α the latency in seconds, B the bandwidth and γ the rate of additions in bytes/s.
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
        """Return the cost of a collective operation; options that are not given have their default values."""
        defaults = {name: option.default for name, option in self.options.items() if not option.is_time_only}
        return self.costs[op](message, **(defaults | options))
