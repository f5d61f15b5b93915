"""The finished steps of a run, stored in columns: 48 bytes per step, so that a run of days fits in memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload


class Step(NamedTuple):
    """One finished step: the mean loss over ranks, the slowest rank's time, the sum of samples and bytes."""

    number: int
    loss: float
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    bytes_sent: int


class Steps(Sequence[Step]):
    """A growing sequence of `Step`, in the order in which the steps finished.

    Example:
        >>> steps = Steps([Step(1, 2.3, 0.1, 320.0, None, 4096)])
        >>> steps[-1].loss, len(steps)
        (2.3, 1)
    """

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self._columns: tuple[array[Any], ...] = tuple(array(code) for code in "qddddq")
        for step in steps:
            self.append(step)

    def append(self, step: Step) -> None:
        """Add the newest step."""
        tokens = math.nan if step.tokens_per_s is None else step.tokens_per_s
        for column, value in zip(self._columns, step._replace(tokens_per_s=tokens), strict=True):
            column.append(value)

    def column(self, name: str, every: int = 1) -> array[Any]:
        """A copy of one field of every `every`-th step; NaN stands for None."""
        return self._columns[Step._fields.index(name)][::every]

    def add_bytes(self, number: int, bytes_sent: int) -> None:
        """Add bytes that were sent for step `number` after it finished; an unknown step is ignored."""
        numbers, sent = self._columns[0], self._columns[-1]
        for index in range(len(numbers) - 1, -1, -1):  # most likely one of the newest
            if numbers[index] == number:
                sent[index] += bytes_sent
                return

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Step]:
        return map(_step, zip(*self._columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...
    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return list(map(_step, zip(*(column[index] for column in self._columns), strict=True)))
        return _step(column[index] for column in self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"Steps({list(self)!r})"


def _step(row: Iterable[Any]) -> Step:
    step = Step(*row)
    return step._replace(tokens_per_s=None) if math.isnan(step.tokens_per_s or 0.0) else step
