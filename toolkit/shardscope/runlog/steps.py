"""The finished steps of a run, stored in columns: about 130 bytes per step, so that a run of days fits in memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step that all ranks have finished.

    Attributes:
        number: Number of the step, from 1.
        t: Time when the last rank finished it, in Unix seconds.
        loss: Mean over the ranks that computed one; NaN if none did.
        step_time_s: Time on the slowest rank, in seconds.
        samples: Number of samples on all ranks.
        tokens: Number of tokens on all ranks; 0 if the model does not read tokens.
        lr: Learning rate of the ranks that computed a loss.
        grad_norm: Largest gradient norm of any rank; NaN if it was not computed.
        sent_bytes: Training bytes that all ranks sent, including late traffic of servers.
        messages: Training messages that all ranks sent.
        memory_bytes: Memory at the end of the step, in bytes, of the rank that used most.
        peak_memory_bytes: Peak memory up to this step, in bytes, of the rank that used most.
        codec_s: Time of packing and unpacking, in seconds, on the rank with most of it; 0 without compression.
        compute_s: Compute time, in seconds, on the rank with most of it; NaN without recorded spans.
        skipped: 1 if a rank skipped its update, for example after an overflow; otherwise 0.
    """

    number: int
    t: float = 0.0
    loss: float = math.nan
    step_time_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    lr: float = math.nan
    grad_norm: float = math.nan
    sent_bytes: int = 0
    messages: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    codec_s: float = 0.0
    compute_s: float = math.nan
    skipped: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples / self.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks per second; None if the model does not read tokens."""
        return self.tokens / self.step_time_s if self.tokens else None


_CODES = "".join("d" if isinstance(Step._field_defaults.get(name), float) else "q" for name in Step._fields)
MOST = 2**62
"""Largest count that a column holds; a damaged log may report more."""
_RATES = {"samples_per_s": "samples", "tokens_per_s": "tokens"}


class Steps:
    """A growing sequence of `Step`, in ascending order.

    Example:
        >>> steps = Steps([Step(1, loss=2.3, step_time_s=0.1, samples=32)])
        >>> steps[-1].loss, steps[-1].samples_per_s, len(steps)
        (2.3, 320.0, 1)
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._columns: tuple[array[Any], ...] = tuple(map(array, _CODES))
        for step in steps:
            self.append(step)

    def append(self, step: Step) -> None:
        """Add the newest step. It replaces all steps from its number on, which a restarted run repeats."""
        while self and self._columns[0][-1] >= step.number:
            for column in self._columns:
                column.pop()
        for column, value in zip(self._columns, step, strict=True):
            column.append(value)

    def column(self, name: str, every: int = 1) -> array[Any]:
        """Return a copy of one field or rate, taking every `every`-th step."""
        if name in _RATES:
            amounts, seconds = self.column(_RATES[name], every), self.column("step_time_s", every)
            return array("d", (amount / each for amount, each in zip(amounts, seconds, strict=True)))
        return self._columns[Step._fields.index(name)][::every]

    def add_traffic(self, number: int, sent_bytes: int, messages: int) -> None:
        """Add traffic that was sent for step `number` after it finished; an unknown step is ignored."""
        index = bisect_left(self._columns[0], number)
        if index < len(self) and self._columns[0][index] == number:
            for name, more in (("sent_bytes", sent_bytes), ("messages", messages)):
                column = self._columns[Step._fields.index(name)]
                column[index] = min(column[index] + more, MOST)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Step]:
        return map(Step._make, zip(*self._columns, strict=True))

    def __getitem__(self, index: int) -> Step:
        return Step._make(column[index] for column in self._columns)
