"""Writes what the routers of a model with experts have done in each step to a rank's event log."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardscope.runlog.writer import EventWriter
from shardscope.training.models.mixture import experts_of
from shardscope.training.strategies.base import RankStrategy


class ExpertWatch:
    """Counts the tokens that each expert gets from this rank; does nothing for a model without experts.

    Args:
        model: The model.
        events: Writer for this rank's event log.
        strategy: The strategy: of ranks with the same tokens, one reports them, and of ranks with parts of the same
            sequences, one reports their number.
    """

    def __init__(self, model: nn.Module, events: EventWriter, strategy: RankStrategy) -> None:
        self.counts_sequences = strategy.is_first_reader
        self.routers, self.events = (
            {name: layer.router for name, layer in experts_of(model)} if strategy.has_own_tokens else {},
            events,
        )
        for router in self.routers.values():
            router.tally.is_on = True

    def begin(self) -> None:
        """Forget the tokens of passes before this step."""
        for router in self.routers.values():
            router.tally.take()

    def write(self, step: int) -> None:
        """Write the event ``experts`` for the passes since `begin`."""
        taken = {name: router.tally.take() for name, router in self.routers.items()}
        if not any(tally.sequences for tally in taken.values()):
            return
        # in a pipeline, only the rank of the first layer with experts reports the number of sequences
        first, *_ = taken.values()
        counts = self.counts_sequences
        experts = {name: router.mixture.experts for name, router in self.routers.items()}
        self.events.emit(
            "experts", step=step, layers=[*taken], sequences=first.sequences * counts,
            assigned=[_numbers(tally.assigned, experts[name]) for name, tally in taken.items()],
            dropped=[_numbers(tally.dropped, experts[name]) for name, tally in taken.items()],
            balances=[_number(tally.balance) * counts for tally in taken.values()],
        )  # fmt: skip


def _numbers(counts: Tensor | None, experts: int) -> list[Any]:
    return [0] * experts if counts is None else counts.tolist()


def _number(total: Tensor | None) -> float:
    return 0.0 if total is None else float(total)
