"""`ss.compare_runs`: compare runs with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shardscope.errors import SpecError, quoted
from shardscope.measure.accuracy import accuracy_of, inside_text
from shardscope.measure.compare_runs.comparison import ComparedRun, RunsComparison, with_speed_up
from shardscope.methods.strategies.pipeline import with_split
from shardscope.runlog.summary import Summary
from shardscope.runtime import Run
from shardscope.spec.job import Job
from shardscope.spec.run_names import run_names

FEWEST = 2


def compare_runs(
    runs: Sequence[Run | str | Path],
    *,
    baseline: Run | str | Path | None = None,
    root: str | Path | None = None,
) -> RunsComparison:
    """Compare runs with each other: the settings in which they differ, and their results.

    `compare` compares one run with its prediction; this function compares runs with each other. The result is displayed
    as a table; `settings`, `results`, `changes` and `frame` return data frames.

    Args:
        runs: Two or more runs, or their names or paths. They may still be running.
        baseline: One of `runs`, relative to which changes are given; None to omit changes.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Raises:
        RunNotFound: A run does not exist.
        SpecError: There are fewer than two runs, a run is given twice, or `baseline` is not one of them.

    Example:
        >>> ss.compare_runs(ss.runs()[:3], baseline=ss.runs()[2]).frame()  # doctest: +SKIP
    """
    if isinstance(runs, Run | str | Path) or not isinstance(runs, Iterable):
        raise SpecError(
            f"compare_runs takes a list of runs, got {quoted(runs)}; write ss.compare_runs([run_a, run_b])"
        )
    found = [Run.attach(run, root) for run in runs]
    paths = [run.path for run in found]
    if len(found) < FEWEST:
        raise SpecError(
            f"compare_runs needs at least {FEWEST} runs, got {len(found)}; to compare one run with its "
            "prediction, use ss.compare"
        )
    if len({*paths}) < len(paths):
        twice = next(run.id for run in found if paths.count(run.path) > 1)
        raise SpecError(f"run {twice} is given twice; give each run once")
    index = None if baseline is None else _index_of(Run.attach(baseline, root), paths)
    inside = inside_text(accuracy_of(found).runs)
    return replace(
        compared([(run.id, _as_it_ran(run), run.summary(), run.note) for run in found], index), inside=inside
    )


def _as_it_ran(run: Run) -> Job:
    """Return the run's job with the split of a pipeline that its ranks measured."""
    return with_split(run.job, run.reduced().split)


def compared(
    told: Sequence[tuple[str, Job, Summary, str]],
    baseline: int | None = None,
    names: Sequence[str] | None = None,
) -> RunsComparison:
    """Return the comparison of runs from the id, job, summary and note of each.

    Args:
        told: Id, job, summary and note of each run.
        baseline: Index of the baseline; None without a baseline.
        names: Names of the runs; None to name them by the settings in which they differ.
    """
    named = run_names([job for _, job, *_ in told]) if names is None else names
    rows = [
        ComparedRun(run_id, name, job, summary, note)
        for name, (run_id, job, summary, note) in zip(named, told, strict=True)
    ]
    return RunsComparison(with_speed_up(rows), baseline)


def _index_of(run: Run, paths: Sequence[Path]) -> int:
    if run.path not in paths:
        raise SpecError(f"the baseline {run.id} is not one of the runs; add it to them")
    return paths.index(run.path)
