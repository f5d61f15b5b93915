"""Changes of the number of ranks in the timeline of a run: ranks that ended on purpose, and those that followed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shardscope_widgets.attempts import Attempt, Attempts
from shardscope_widgets.words import duration_text, plural


class Resized(NamedTuple):
    """One change of the number of ranks, which no failure caused.

    Attributes:
        before: Number of ranks before it.
        after: Number of ranks after it.
        step: The last step of the ranks before it.
        at_s: When that step had ended.
        again_s: When all ranks after it began to train; None until then.
    """

    before: int
    after: int
    step: int
    at_s: float
    again_s: float | None

    @property
    def text(self) -> str:
        """The change as a sentence."""
        what = f"Resized from {self.before} to {plural(self.after, 'rank')} after step {self.step}"
        if self.again_s is None:
            return f"{what}; the ranks are starting."
        return f"{what}; training continued after {duration_text(self.again_s - self.at_s)}."


def resized(attempts: Attempts, failures: Sequence[float]) -> list[Resized]:
    """Return the changes of the number of ranks: attempts of rank 0 that follow each other without a failure.

    Args:
        attempts: The attempts of all ranks.
        failures: When the agent noticed each failure, in Unix seconds.
    """
    zero = attempts.begun or 0.0
    found = []
    for old, new in pairwise(attempts.of_rank.get(0, ())):
        if any(old.begun < failed <= new.begun for failed in failures):
            continue
        before, after = together(attempts, old), together(attempts, new)
        ended = max(each.ends[-1] if each.ends else each.last for each in before)
        again = began_to_train(after)
        found.append(
            Resized(
                len(before), len(after), old.last_step, min(ended, new.begun) - zero,
                None if again is None else again - zero,
            )
        )  # fmt: skip
    return found


def together(attempts: Attempts, one: Attempt) -> list[Attempt]:
    """Return the attempts that went on at the same time as this one, and itself."""
    return [each for each in attempts if each.begun <= one.last and each.last >= one.begun]


def began_to_train(attempts: Sequence[Attempt]) -> float | None:
    """Return when the last of these attempts began its first step; None until then, or if there are none."""
    starts = [each.first for each in attempts]
    known = [start for start in starts if start is not None]
    return max(known) if known and len(known) == len(starts) else None
