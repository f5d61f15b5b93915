"""The gradients that a rank computes in one step: one, unless ranks share the parts of each global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardscope.training.data import num_rows
from shardscope.training.data.batches import reads_tokens
from shardscope.training.strategies import StepResult
from shardscope.training.strategies.base import MicroBatch, RankStrategy


class Turn(NamedTuple):
    """One gradient that a rank has computed, and the amount of data."""

    result: StepResult
    samples: int
    tokens: int | None
    """Number of tokens; None if the model does not read tokens."""

    @classmethod
    def of(cls, result: StepResult, micro_batches: list[MicroBatch], *, counts_samples: bool = True) -> Turn:
        """Return a turn; data on which no loss was computed do not count.

        Samples of which several ranks have parts count on one of them, with `counts_samples`.
        """
        counted = micro_batches if result.loss is not None else []
        tokens = sum(targets.numel() for _, targets in counted) if reads_tokens(counted) else None
        return cls(result, sum(num_rows(inputs) for inputs, _ in counted) * counts_samples, tokens)


class Turns(list[Turn]):
    """All gradients of a rank in one step, in order."""

    @property
    def result(self) -> StepResult:
        """The result of the step."""
        return StepResult.of([turn.result for turn in self])

    @property
    def failed(self) -> float | None:
        """The first loss that is not finite; None if all losses are finite."""
        losses = (turn.result.loss for turn in self)
        return next((loss for loss in losses if loss is not None and not math.isfinite(loss)), None)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(turn.samples for turn in self)

    @property
    def tokens(self) -> int | None:
        """Number of tokens; None if the model does not read tokens, or there is no gradient."""
        known = [turn.tokens for turn in self if turn.tokens is not None]
        return sum(known) if known else None


def codec_seconds(strategy: RankStrategy, spans: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return the time that a step spent packing and unpacking, in seconds; empty without a compressor."""
    if strategy.compressor is None:
        return {}
    return {"codec_s": round(sum(end - start for lane, _, start, end, _ in spans if lane == "codec"), 6)}
