"""The table of several runs: settings that differ, results, and changes relative to a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardscope import show
from shardscope.errors import SpecError, unknown_name
from shardscope.measure.compare_runs import view
from shardscope.runlog.figures import FIGURES
from shardscope.runlog.summary import Summary
from shardscope.spec.job import Job
from shardscope.spec.settings import Settings, differing, one_process_baseline, settings_of

if TYPE_CHECKING:
    import pandas as pd

SPEED = "speed_up"
"""Name of the result that only a comparison has: throughput relative to one process with the same workload."""
SCHEMA = 1
_SPEEDS = frozenset({"step_time_s", "tokens_per_s", "samples_per_s"})


@dataclass(frozen=True)
class ComparedRun:
    """One run in a comparison.

    Attributes:
        run_id: Name of the run directory.
        name: Name of the run, from the settings in which it differs from the others.
        job: The job.
        summary: Its summary.
        note: The user's note; empty if there is none.
        speed_up: Throughput divided by that of the single-process run with the same workload; None if there is none.
    """

    run_id: str
    name: str
    job: Job
    summary: Summary
    note: str = ""
    speed_up: float | None = None

    def result(self, name: str) -> float | None:
        """Return a result: a figure of the summary, or `SPEED`."""
        value: float | None = self.speed_up if name == SPEED else getattr(self.summary, name)
        return value


@dataclass(frozen=True)
class RunsComparison:
    """Runs compared with each other, as returned by `compare_runs`.

    Attributes:
        runs: The runs, in the order given.
        baseline: Index of the run relative to which changes are given; None without a baseline.
        inside: How many step times lie inside the intervals predicted at launch, in words; empty if unknown.
    """

    runs: tuple[ComparedRun, ...]
    baseline: int | None = None
    inside: str = ""

    @cached_property
    def tables(self) -> tuple[Settings, ...]:
        """All settings of each run."""
        return tuple(settings_of(run.job) for run in self.runs)

    @cached_property
    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings in which the runs differ, the most informative settings first."""
        return differing(self.tables)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """Names of the results that at least one run has."""
        counted = "tokens_per_s" if all(run.summary.tokens_per_s for run in self.runs) else "samples_per_s"
        hidden = {"samples_per_s", "tokens_per_s"} - {counted}
        if not any(run.summary.restarts for run in self.runs):
            hidden |= {"restarts", "lost_steps", "goodput"}
        names = [name for name in FIGURES if name not in hidden]
        names.insert(names.index(counted) + 1, SPEED)
        return tuple(name for name in names if any(run.result(name) is not None for run in self.runs))

    @cached_property
    def speed_names(self) -> tuple[str, ...]:
        """Names of the results on speed (step time and throughput), which come first in tables."""
        return tuple(name for name in self.result_names if name in _SPEEDS)

    @cached_property
    def other_names(self) -> tuple[str, ...]:
        """Names of the results that come after the settings in tables."""
        return tuple(name for name in self.result_names if name not in _SPEEDS)

    def settings(self) -> pd.DataFrame:
        """Return the settings that differ: one row per run, and one column per setting, such as ``optimizer.lr``."""
        rows = [[table.get(name) for name in self.setting_names] for table in self.tables]
        return self._frame(rows, self.setting_names)

    def results(self) -> pd.DataFrame:
        """Return the results, with one row per run and one column per figure of `Summary`, and ``speed_up``."""
        return self._frame(self._results(), self.result_names)

    def changes(self) -> pd.DataFrame:
        """Return each result divided by the baseline's, minus 1: 0.1 means 10 % more than the baseline.

        Raises:
            SpecError: The comparison has no baseline.
        """
        if self.baseline is None:
            raise SpecError(
                "this comparison has no baseline; give one, as in ss.compare_runs(runs, baseline=run)"
            )
        found = self.results().astype(float)
        return found / found.iloc[self.baseline] - 1

    def frame(self) -> pd.DataFrame:
        """Return settings and results in one data frame, with one row per run."""
        return self.settings().join(self.results(), rsuffix=" (result)")

    def grouped(self, by: str) -> pd.DataFrame:
        """Return the mean of each result over the runs with the same value of a setting, and the number of runs.

        Args:
            by: Name of a setting, such as ``optimizer.lr`` or ``strategy``.

        Raises:
            SpecError: There is no such setting.
        """
        import pandas as pd

        names = dict.fromkeys(name for table in self.tables for name in table)
        if by not in names:
            raise unknown_name("setting", by, names)
        found = self.results().astype(float)
        keys = pd.Series([table.get(by) for table in self.tables], index=found.index, dtype=object)
        means = found.groupby(keys, dropna=False, sort=False).mean()
        means.insert(0, "runs", found.groupby(keys, dropna=False, sort=False).size())
        return means.rename_axis(by)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, for JSON."""
        return {
            "schema": SCHEMA,
            "settings": list(self.setting_names),
            "results": list(self.result_names),
            "baseline": None if self.baseline is None else self.runs[self.baseline].run_id,
            "inside": self.inside,
            "runs": [self._plain(index) for index in range(len(self.runs))],
        }

    def _plain(self, index: int) -> dict[str, Any]:
        run, table = self.runs[index], self.tables[index]
        return {
            "id": run.run_id, "name": run.name, "state": run.summary.state, "note": run.note,
            "diverged_at": run.summary.diverged_at,
            "settings": {name: table.get(name) for name in self.setting_names},
            "results": {name: run.result(name) for name in self.result_names},
        }  # fmt: skip

    def _results(self) -> list[list[float | None]]:
        return [[run.result(name) for name in self.result_names] for run in self.runs]

    def _frame(self, rows: Sequence[Sequence[Any]], names: Sequence[str]) -> pd.DataFrame:
        import pandas as pd

        index = pd.Index([run.name for run in self.runs], name="run")
        return pd.DataFrame(rows, index=index, columns=list(names))

    def __repr__(self) -> str:
        return show.text(view.shown(self, in_html=False))

    def _repr_html_(self) -> str:
        return show.html(view.shown(self, in_html=True))


def with_speed_up(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """Return the runs with their speed-up over the single-process run of the same workload, if there is one."""
    jobs = [run.job for run in runs]
    rates = [run.summary.tokens_per_s or run.summary.samples_per_s for run in runs]
    ups = []
    for job, rate in zip(jobs, rates, strict=True):
        index = one_process_baseline(job, jobs)
        base = None if index is None else rates[index]
        ups.append(rate / base if rate and base else None)
    return tuple(replace(run, speed_up=up) for run, up in zip(runs, ups, strict=True))
