"""The result of a scaling study: step times and efficiencies by number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardscope.calibration.calibration import Interval
from shardscope.measure.scaling.sizes import AnyCluster, Kind
from shardscope.show import Part, Shown, Table
from shardscope.spec import Job
from shardscope.spec.units import bytes_text, duration_text

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 64
"""Maximum number of workers whose steps are simulated message by message."""

SOURCES = ("measured", "predicted", "simulated")
"""Sources of step times."""


class Point(NamedTuple):
    """One number of workers. A time is None if it was not measured or not simulated."""

    kind: Kind
    workers: int
    global_batch: int
    predicted_s: float
    simulated_s: float | None = None
    measured_s: float | None = None
    interval_s: Interval | None = None
    """Interval of the predicted step time, in seconds; None if unknown."""
    sent_bytes: float | None = None
    """Predicted bytes that the busiest rank sends in a step; None if unknown."""
    run: str | None = None
    """The run that was measured."""
    jitter_wait_s: float | None = None
    """Part of the predicted step time in which ranks wait for the slowest, because of jitter; None without jitter."""


@dataclass(frozen=True, repr=False)
class Scaling(Shown):
    """Step times of a job by number of workers, with `efficiency`; `frame` returns them as a data frame.

    Attributes:
        job: The job.
        cluster: The type of cluster; None if the job runs on this machine.
        where: Name of the cluster, with the number of nodes of `cluster`.
        points: The points, by kind of scaling and number of workers.
        note: Further remarks, in sentences; empty if there are none.
    """

    job: Job
    cluster: AnyCluster
    where: str
    points: tuple[Point, ...]
    note: str = ""

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    @property
    def is_measured(self) -> bool:
        """Whether the job has been run."""
        return any(point.measured_s is not None for point in self.points)

    def efficiencies(self, time: str) -> list[float | None]:
        """Return the efficiency of each point: samples per second and worker, relative to the fewest workers.

        The reference is the point of the same kind of scaling with the fewest workers that has this time. With weak
        scaling, the efficiency is the reference's step time divided by the point's step time.

        Args:
            time: The step time to use: ``measured_s``, ``predicted_s`` or ``simulated_s``.
        """
        found: list[float | None] = []
        for point in self.points:
            rate = _rate(point, getattr(point, time))
            alike = [each for each in self.points if each.kind == point.kind and getattr(each, time)]
            first = min(alike, key=lambda each: each.workers, default=point)
            base = _rate(first, getattr(first, time))
            found.append(None if rate is None or base is None else rate / base)
        return found

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per kind of scaling and number of workers.

        Columns: kind, workers, global_batch, step times in seconds (measured_s, predicted_s, simulated_s; the interval
        of the prediction, low_s and high_s; and its part for waits for the slowest rank, jitter_wait_s), efficiencies
        from these step times (measured_efficiency, predicted_efficiency, simulated_efficiency; 0 to 1), sent_bytes of
        the busiest rank in a step, and the run.
        Columns without a value are left out.
        """
        import pandas as pd

        found = [self.efficiencies(f"{name}_s") for name in SOURCES]
        rows = [self._row(point, values) for point, *values in zip(self.points, *found, strict=True)]
        return pd.DataFrame(rows).dropna(axis="columns", how="all")

    @staticmethod
    def _row(point: Point, efficiencies: Sequence[float | None]) -> dict[str, object]:
        low, high = point.interval_s or (None, None)
        shares = zip(SOURCES, efficiencies, strict=True)
        return {
            "kind": point.kind, "workers": point.workers, "global_batch": point.global_batch,
            **{f"{name}_s": getattr(point, f"{name}_s") for name in SOURCES}, "low_s": low, "high_s": high,
            "jitter_wait_s": point.jitter_wait_s,
            **{f"{name}_efficiency": value for name, value in shares}, "sent_bytes": point.sent_bytes, "run": point.run,
        }  # fmt: skip

    @property
    def _title(self) -> str:
        kind = "Scaling" if self.is_measured else "Predicted scaling"
        return f"{kind} of {self.job.label} on {self.where}"

    def _shown(self) -> list[Part]:
        frame = self.frame().drop(columns=["run"], errors="ignore")
        return [Table.of_frame(frame, self._title, self.note, texts=_TEXTS)]


_TEXTS = {"_s": duration_text, "_efficiency": "{:.1%}".format, "sent_bytes": bytes_text}


def _rate(point: Point, seconds: float | None) -> float | None:
    """Return the samples per second and worker; None without a step time."""
    return None if not seconds else point.global_batch / seconds / point.workers


def in_order(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points by kind of scaling, weak first, and number of workers."""
    return tuple(sorted(points, key=lambda point: (point.kind != "weak", point.workers)))
