"""Result of a batch-size sweep: its runs, its points (one per optimizer and batch size), and its target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal

from shardscope.errors import StudyError
from shardscope.spec import Job
from shardscope.spec.units import duration_text

if TYPE_CHECKING:
    import pandas as pd

TARGET_MARGIN = 1.25
_COLUMNS = (
    "reaches the target", "validation {quality}", "validation accuracy", "learning rate", "steps", "training time",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        batch: Global batch size, in samples.
        rate: Learning rate.
        value: Quality on the validation split; None if the run failed, for example because it diverged.
        steps: Number of steps of the run.
        reason: First line of the run's error; None if there is none.
        step_s: Median time of a step on the slowest rank, in seconds; None if the run failed.
        accuracy: Fraction of correct answers on the validation split; None if the run failed, or was recorded
            by an earlier version.
    """

    optimizer: str
    batch: int
    rate: float
    seed: int
    value: float | None
    steps: int
    reason: str | None = None
    step_s: float | None = field(default=None, compare=False)
    accuracy: float | None = None


@dataclass(frozen=True)
class SweepPoint:
    """Result of one optimizer at one batch size: the learning rate, and the quality of each completed run with it.

    The run of the seed that selected the rate is excluded, unless there was only one rate.

    Attributes:
        batch: Global batch size, in samples.
        steps: Number of steps of each run.
        rate: Best of the learning rates tried.
        values: Quality of each completed run on the validation split.
        num_seeds: Number of runs at the best rate, including failed ones.
        rates: Learning rates tried, in ascending order.
        step_s: Median time of a step, in seconds; None if it was not measured.
        accuracies: Fraction of correct answers of each completed run on the validation split; empty if not
            recorded.
    """

    optimizer: str
    batch: int
    steps: int
    rate: float
    values: tuple[float, ...]
    num_seeds: int
    rates: tuple[float, ...] = ()
    step_s: float | None = field(default=None, compare=False)
    accuracies: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median quality over all seeds, where a failed run counts as infinite."""
        failed = self.num_seeds - len(self.values)
        return median([*self.values, *[math.inf] * failed])

    @property
    def accuracy(self) -> float | None:
        """Median fraction of correct answers of the completed runs; None if there are none, or it was not recorded."""
        return median(self.accuracies) if self.accuracies else None

    @property
    def edge(self) -> Literal["lowest", "highest"] | None:
        """Whether the best rate is the lowest or highest of the rates tried, so that a better one may lie beyond."""
        if len(self.rates) < 2 or self.rates[0] < self.rate < self.rates[-1]:
            return None
        return "lowest" if self.rate == self.rates[0] else "highest"

    @property
    def seconds(self) -> float | None:
        """Training time of a run, in seconds, without evaluation; None if it was not measured."""
        return None if self.step_s is None else self.steps * self.step_s

    def straddles(self, target: float) -> bool:
        """Return whether some runs reach the target and other runs miss it."""
        reached = sum(value <= target for value in self.values)
        return 0 < reached < self.num_seeds

    def reaches(self, target: float) -> bool:
        """Return whether the median over seeds is finite and at most the target."""
        return math.isfinite(self.median) and self.median <= target


@dataclass(frozen=True)
class BatchSweep:
    """Result of a batch-size sweep: the target quality, and one point per optimizer and batch size.

    An optimizer has no points beyond the first batch size at which it misses the target.

    Attributes:
        target_from: The point whose median times 1.25 is the target; None if the target was given by the caller.
        batches: All requested batch sizes, in ascending order.
    """

    job: Job
    quality: str
    target: float
    points: tuple[SweepPoint, ...]
    target_from: SweepPoint | None = None
    batches: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Number of samples that every run trains on, each counted as often as it is used."""
        return self.job.steps * self.job.batch.global_batch

    def point(self, optimizer: str, batch: int) -> SweepPoint:
        """Return the result of an optimizer at a batch size.

        Raises:
            StudyError: The sweep did not run this optimizer at this batch size.
        """
        for point in self.points:
            if (point.optimizer, point.batch) == (optimizer, batch):
                return point
        known = ", ".join(f"{point.optimizer} at {point.batch}" for point in self.points)
        raise StudyError(f"the sweep did not run {optimizer} at batch size {batch}; it ran {known}")

    def largest(self, optimizer: str) -> int | None:
        """Return the largest batch size such that it and all smaller ones reach the target; None if there is none."""
        largest = None
        for point in sorted((p for p in self.points if p.optimizer == optimizer), key=lambda p: p.batch):
            if not point.reaches(self.target):
                break
            largest = point.batch
        return largest

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with one row per point, for computations; see `table` for a readable text version.

        Columns: optimizer, batch, steps, rate (the best), edge (``lowest`` or ``highest`` if it is at an end of the
        rates tried), the median quality, accuracy (the median), num_seeds, reached, seconds_per_step and
        seconds_to_target (the training time of a run that reaches the target; missing if it is not reached).
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "optimizer": point.optimizer, "batch": point.batch, "steps": point.steps, "rate": point.rate,
                "edge": point.edge or "", self.quality: point.median,
                "accuracy": point.accuracy, "num_seeds": point.num_seeds,
                "reached": point.reaches(self.target), "seconds_per_step": point.step_s,
                "seconds_to_target": point.seconds if point.reaches(self.target) else None,
            }
            for point in self.points
        )  # fmt: skip

    @property
    def table(self) -> pd.DataFrame:
        """Text table with one row per optimizer and batch size, including sizes that were not run, with the reason."""
        import pandas as pd

        rows: dict[tuple[str, str], list[str]] = {}
        for name in dict.fromkeys(point.optimizer for point in self.points):
            points = [point for point in self.points if point.optimizer == name]
            rows |= {(name, str(point.batch)): self._row(point) for point in points}
            missing = [str(batch) for batch in self.batches if batch > points[-1].batch]
            if missing:
                why = f"not run, because {points[-1].batch} missed it"
                rows[name, ", ".join(missing)] = [why, *[""] * (len(_COLUMNS) - 1)]
        index = pd.MultiIndex.from_tuples(rows, names=["optimizer", "batch size"])
        columns = [column.format(quality=self.quality) for column in _COLUMNS]
        return pd.DataFrame(list(rows.values()), index=index, columns=columns)

    def _row(self, point: SweepPoint) -> list[str]:
        """Return the texts of a point, in the order of `_COLUMNS`."""
        reached = "yes" if point.reaches(self.target) else "no"
        is_narrow = point.straddles(self.target)
        return [
            f"{reached}, narrowly" if is_narrow else reached,
            f"{point.median:.3g}" if math.isfinite(point.median) else "diverged",
            "unknown" if point.accuracy is None else f"{point.accuracy:.1%}",
            f"{point.rate:.2g}",
            str(point.steps),
            "unknown" if point.seconds is None else duration_text(point.seconds),
        ]

    def __str__(self) -> str:
        lines = [
            f"Largest batch size that reaches {self.quality} {self.target:.4g} on {self.num_samples:,} samples:"
        ]
        for name in dict.fromkeys(point.optimizer for point in self.points):
            found = self.largest(name)
            lines.append(f"  {name:9} {found if found is not None else 'none of those tried'}")
        return "\n".join(lines)


def worst_of(points: Sequence[SweepPoint]) -> SweepPoint | None:
    """Return the point with the highest finite median; None if all runs failed."""
    return max((p for p in points if math.isfinite(p.median)), key=lambda p: p.median, default=None)
