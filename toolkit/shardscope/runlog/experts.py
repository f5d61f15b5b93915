"""Loads of a run's experts: tokens of each expert in each step, how uneven they are, and how many are dropped.

Ranks report the loads of their own tokens; the loads of a step are the sums over ranks. Only the newest steps keep the
loads of every expert; earlier ones keep their figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from statistics import fmean
from typing import Any, NamedTuple

Loads = tuple[tuple[int, ...], ...]
"""Number of choices by layer and expert."""
_WHOLE_STEPS = 64
"""Number of the newest steps that keep the loads of every expert."""


class ExpertFigures(NamedTuple):
    """Figures of one step, over all ranks and layers with experts."""

    imbalance: float
    """Tokens of the busiest expert of a layer, relative to an even load, mean over layers; 1 if the load is even."""
    dropped: float
    """Fraction of the choices that were dropped, because their expert was full."""
    balance_loss: float
    """Balance loss, mean over layers, without its weight in the loss; 1 if the load is even."""


@dataclass
class StepLoads:
    """Loads of one step, summed over the ranks that have reported it.

    Attributes:
        assigned: Choices of each expert, with those that were dropped.
        dropped: Choices of each expert that were dropped.
        balances: Sums of the sequences' balance losses, by layer.
        sequences: Number of sequences.
    """

    assigned: Loads
    dropped: Loads
    balances: tuple[float, ...]
    sequences: int

    def __add__(self, other: StepLoads) -> StepLoads:
        return StepLoads(
            _sum(self.assigned, other.assigned), _sum(self.dropped, other.dropped),
            tuple(map(sum, zip(self.balances, other.balances, strict=True))), self.sequences + other.sequences,
        )  # fmt: skip

    @property
    def figures(self) -> ExpertFigures:
        """The step's figures."""
        total = sum(map(sum, self.assigned))
        return ExpertFigures(
            fmean(imbalance_of(layer) for layer in self.assigned),
            sum(map(sum, self.dropped)) / total if total else 0.0,
            fmean(self.balances) / self.sequences if self.sequences else 0.0,
        )


def imbalance_of(loads: Sequence[float]) -> float:
    """Return the largest of some loads, relative to their mean; 1 if all are zero.

    Example:
        >>> imbalance_of([10, 30])
        1.5
    """
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


@dataclass
class ExpertLog:
    """Loads and figures of the steps so far.

    Attributes:
        layers: Names of the layers with experts, in order; empty if the model has none.
        newest: Loads of the newest steps, by step.
        figures: Figures of all steps, by step.
    """

    layers: tuple[str, ...] = ()
    newest: dict[int, StepLoads] = field(default_factory=dict)
    figures: dict[int, ExpertFigures] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Add the loads of one rank in one step."""
        step, self.layers = event["step"], tuple(event["layers"])
        assigned, dropped = (tuple(map(tuple, event[name])) for name in ("assigned", "dropped"))
        own = StepLoads(assigned, dropped, tuple(map(float, event["balances"])), event["sequences"])
        before = self.newest.get(step)
        if before is None and step in self.figures:
            return  # of a rank that reports it very late
        self.newest[step] = own if before is None or len(before.assigned) != len(assigned) else before + own
        self.figures[step] = self.newest[step].figures
        while len(self.newest) > _WHOLE_STEPS:
            self.newest.pop(min(self.newest))

    def rewind(self, step: int) -> None:
        """Discard what was recorded after `step`, from which training continues."""
        self.newest = {number: each for number, each in self.newest.items() if number <= step}
        self.figures = {number: each for number, each in self.figures.items() if number <= step}

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """Fraction of the choices that each expert got and kept in the newest steps, by layer; empty without steps."""
        if not self.newest:
            return ()
        total = list(self.newest.values())
        whole = [
            reduce(_sum, (each.assigned for each in total)),
            reduce(_sum, (each.dropped for each in total)),
        ]
        return tuple(
            tuple((got - lost) / max(1, sum(assigned)) for got, lost in zip(assigned, dropped, strict=True))
            for assigned, dropped in zip(*whole, strict=True)
        )

    @property
    def recent(self) -> ExpertFigures | None:
        """Mean figures of the newest steps; None before the first step, and for models without experts."""
        if not self.newest:
            return None
        columns = zip(*(self.figures[step] for step in self.newest), strict=True)
        return ExpertFigures(*map(fmean, columns))


def _sum(one: Loads, other: Loads) -> Loads:
    return tuple(tuple(map(sum, zip(*pair, strict=True))) for pair in zip(one, other, strict=True))
