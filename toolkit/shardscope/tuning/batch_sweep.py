"""Batch-size sweep: the largest batch at which each optimizer still reaches a target with the same number of samples.

    sweep = batch_sweep(job, batches=PowersOfTwo(32, 1024), target=0.1)
    sweep.largest("lamb")

All runs train on the same number of samples, so larger batches take fewer steps. At each batch size, the first seed
looks for a learning rate, and runs are compared on the validation split. The search starts at the rate chosen at the
next smaller batch size, scaled by the optimizer's rule (linear for SGD and LARS, Goyal et al. 2017; square root for
AdamW and LAMB, You et al. 2020), and moves towards lower losses until the best rate lies between two others, at most
`MOST_ADDED` beyond the rates given. The search ends early at a rate that reaches the target; at the smallest batch
size there is no target yet. Then this rate is run with the other seeds, and the median of those runs is the result. If
the median misses the target, the search continues. The first seed is excluded because its value is the minimum over
several rates, which is biased low. An optimizer that misses the target is not run at larger batch sizes. A
sweep that was stopped can be resumed; completed runs are not repeated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from shardscope.analytic.large_batch import scaled_lr
from shardscope.errors import SpecError, StudyError, quoted
from shardscope.runtime import Run, launch
from shardscope.spec import Job, LRSchedule, Optimizer, Record
from shardscope.spec.space import PowersOfTwo
from shardscope.tuning.apply import apply, checked_rows
from shardscope.tuning.driver import MOST_ATTEMPTS, was_killed
from shardscope.tuning.measured import TrialReader
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.progress import SweepProgress
from shardscope.tuning.runs import run_to_end
from shardscope.tuning.storage import folder_of
from shardscope.tuning.sweep_result import TARGET_MARGIN, BatchSweep, Cell, SweepPoint, worst_of

OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")
FACTORS = (0.5, 1.0, 2.0)
"""Learning rates to try, as multiples of the best rate at the next smaller batch size after scaling by the rule."""
MOST_ADDED = 3
"""Maximum number of learning rates added beyond those given, while the best rate is the lowest or highest tried."""
_WARMUP = 0.1
_MOMENTUM = 0.9
"""Momentum used for optimizers whose default momentum is 0, because large-batch SGD is usually run with momentum."""
_RECORD = Record(spans_first=0, memory_first=0, memory_every=None, messages_first=0, layers_every=0)
"""Record as little as possible, so that runs are short and step times measure training alone."""


def batch_sweep(
    job: Job,
    *,
    batches: PowersOfTwo,
    target: float | None = None,
    quality: Literal["loss", "error"] = "loss",
    optimizers: Sequence[str] = OPTIMIZERS,
    rates: Mapping[str, float] | None = None,
    factors: Sequence[float] = FACTORS,
    seeds: Sequence[int] = (0, 1, 2, 3),
    name: str | None = None,
    root: str | Path | None = None,
    on_cell: Callable[[Cell], None] | None = None,
    thorough: bool = False,
    progress: bool | None = None,
) -> BatchSweep:
    """Find the largest batch at which each optimizer still reaches a target with the same number of samples.

    Args:
        job: What to train. Every run trains on as many samples as this job.
        batches: Batch sizes to try.
        target: Value to reach on the validation split. None uses 1.25 times the worst (highest) finite median among
            the optimizers at the smallest batch size; the margin allows for the variation between seeds, which is
            10 % or more.
        quality: ``loss``, or ``error`` (the fraction of wrong answers).
        optimizers: Names of the optimizers to compare.
        rates: Learning rates by optimizer name, for the job's batch size; None uses each optimizer's default rate.
        factors: Learning rates to try at each batch size, as multiples of the rate chosen at the next smaller
            batch size, scaled by the optimizer's rule. The search starts at the factor nearest to 1 and moves towards
            lower losses; if there are several factors, it may go up to three rates beyond them.
        seeds: Seeds of the runs. The runs with the first seed select the learning rate, and the median is over the
            other seeds. If `factors` has only one entry, the median is over all seeds.
        name: Name of the sweep. Another call with the same name and arguments reuses the completed runs. Derived from
            the arguments by default.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        on_cell: Called with the `Cell` of each run after it ends.
        thorough: Whether to look for the best learning rate at every batch size. By default, the search ends with the
            first rate that reaches the target; this takes fewer runs and finds the same limits.
        progress: Whether to show a line with the number of runs and the time left. None rewrites the line in a terminal
            or notebook, and otherwise prints one line to standard error at the end.

    Raises:
        SpecError: A batch size is impossible or leaves fewer than 2 steps, or no seed is left for the median.
        StudyError: A sweep with this name exists with different arguments or from an earlier version, or one of its
            runs was stopped by the user.
    """
    if quality not in QUALITIES:
        raise SpecError(f"quality={quality!r} is not a measure of quality; use 'loss' or 'error'")
    _check(job, batches, optimizers, seeds, factors)
    usual = {**{n: Optimizer(name=n).lr for n in optimizers}, **(rates or {})}
    asked = _digest(job, usual, quality)
    folder = folder_of(name or f"batches-{asked}", root)
    _claim(folder / "asked", asked, name)
    known = _load(folder / "cells.jsonl")
    plan = _Plan(job, usual, quality, folder, known, on_cell, SweepProgress(progress), thorough)
    sizes = [2**e for e in range(batches.exponents[0], batches.exponents[1] + 1)]
    with plan.progress:
        return plan.sweep(optimizers, sizes, sorted(factors), seeds, target)


class _Grid(NamedTuple):
    """Ascending learning rates for one optimizer and batch size, and the index of the rate to start with."""

    rates: Sequence[float]
    start: int

    def rate(self, place: int) -> float:
        """Return the rate at an index, extrapolated if the index lies beyond either end."""
        rates = self.rates
        if place < 0:
            return rates[0] * (rates[0] / rates[1]) ** -place
        if place >= len(rates):
            return rates[-1] * (rates[-1] / rates[-2]) ** (place - len(rates) + 1)
        return rates[place]


@dataclass(frozen=True)
class _Plan:
    """Settings common to all runs of a sweep, and the folder in which they are stored."""

    job: Job
    usual: Mapping[str, float]
    quality: str
    folder: Path
    known: dict[tuple[str, int, float, int], Cell]
    on_cell: Callable[[Cell], None] | None
    progress: SweepProgress
    thorough: bool
    counted: set[tuple[str, int, float, int]] = field(default_factory=set)
    """Runs that the progress display has already counted; a continued search visits them again."""

    def sweep(
        self, optimizers: Sequence[str], batches: Sequence[int], factors: Sequence[float], seeds: Sequence[int],
        target: float | None,
    ) -> BatchSweep:  # fmt: skip
        """Run all optimizers at the smallest batch size, then, at each larger size, the optimizers that still
        reach the target.
        """
        runs_per_point = len(seeds) if len(factors) == 1 else len(factors) + len(seeds) - 1
        start = min(range(len(factors)), key=lambda n: abs(factors[n] - 1))
        points: list[SweepPoint] = []
        target_from, remaining = None, list(optimizers)
        best = {name: (self.job.batch.global_batch, rate) for name, rate in self.usual.items()}
        for place, batch in enumerate(batches):
            found = []
            for number, optimizer in enumerate(remaining):
                points_left = len(remaining) * (len(batches) - place) - number
                work = len(remaining) * sum(map(_work, batches[place:])) - number * _work(batch)
                self.progress.expect(points_left * runs_per_point, work * runs_per_point)
                middle = _by_rule(optimizer, *best[optimizer], batch)
                grid = _Grid([middle * factor for factor in factors], start)
                found.append(self._point(optimizer, batch, grid, seeds, target))
                best[optimizer] = batch, found[-1].rate
            if target is None:
                target_from = worst_of(found)
                target = math.inf if target_from is None else TARGET_MARGIN * target_from.median
            points += found
            remaining = [point.optimizer for point in found if point.reaches(target)]
        assert target is not None
        points.sort(key=lambda point: list(optimizers).index(point.optimizer))
        return BatchSweep(self.job, self.quality, target, tuple(points), target_from, tuple(batches))

    def _point(
        self, optimizer: str, batch: int, grid: _Grid, seeds: Sequence[int], target: float | None
    ) -> SweepPoint:
        """Find a learning rate with the first seed, and run this rate with the other seeds."""
        others = seeds[1:] if len(grid.rates) > 1 else seeds
        enough = None if self.thorough else target
        point = self._measured(self._tried(optimizer, batch, grid, seeds[0], enough), others)
        if enough is None or point.reaches(enough):
            return point
        return self._measured(self._tried(optimizer, batch, grid, seeds[0], None), others)

    def _measured(self, tried: Sequence[Cell], seeds: Sequence[int]) -> SweepPoint:
        """Run the best rate among those in `tried`, once for each of `seeds`."""
        best = tried[_best(tried)]
        cells = [self._cell(best.optimizer, best.batch, best.rate, seed) for seed in seeds]
        values = tuple(cell.value for cell in cells if cell.value is not None)
        accuracies = tuple(c.accuracy for c in cells if c.value is not None and c.accuracy is not None)
        times = [cell.step_s for cell in (*tried, *cells) if cell.step_s is not None]
        return SweepPoint(
            best.optimizer, best.batch, best.steps, best.rate, values, len(cells), tuple(cell.rate for cell in tried),
            median(times) if times else None, accuracies,
        )  # fmt: skip

    def _tried(self, optimizer: str, batch: int, grid: _Grid, seed: int, enough: float | None) -> list[Cell]:
        """Run rates until the best lies between two others, or one reaches `enough`; return the runs in rate order."""
        is_upwards = _by_rule(optimizer, 1, 1.0, 2) < 2  # the rule grows more slowly than the batch size
        tried: dict[int, Cell] = {}
        place: int | None = grid.start
        while place is not None:
            tried[place] = self._cell(optimizer, batch, grid.rate(place), seed)
            value = tried[place].value
            if enough is not None and value is not None and value <= enough:
                break
            place = _next_place(tried, len(grid.rates), is_upwards=is_upwards)
        return [tried[place] for place in sorted(tried)]

    def _cell(self, optimizer: str, batch: int, rate: float, seed: int) -> Cell:
        key = (optimizer, batch, rate, seed)
        if key not in self.counted:
            self.progress.draw()
        if key not in self.known:
            self.known[key] = self._run(*key)
            _append(self.folder / "cells.jsonl", self.known[key])
            if self.on_cell is not None:
                self.on_cell(self.known[key])
        if key not in self.counted:
            self.counted.add(key)
            self.progress.count(_work(batch))
        return self.known[key]

    def _run(self, optimizer: str, batch: int, rate: float, seed: int) -> Cell:
        job = _job(self.job, optimizer, batch, rate, seed)
        run = _run_to_end(job, self.folder / "trials")
        if run.error is not None:
            reason = str(run.error).splitlines()[0]
            return Cell(optimizer, batch, rate, seed, None, job.steps, reason)
        measured = TrialReader(run).poll()
        value = measured.objective(self.quality, job.steps)
        finite = value is not None and math.isfinite(value)
        error = measured.objective("error", job.steps)
        return Cell(
            optimizer, batch, rate, seed, value if finite else None, job.steps, step_s=measured.step_s,
            accuracy=None if error is None else 1 - error,
        )  # fmt: skip


def _work(batch: int) -> float:
    """Return what the number of steps of a run is proportional to: all runs train on equally many samples."""
    return 1 / batch


def _by_rule(optimizer: str, base_batch: int, rate: float, batch: int) -> float:
    """Return the learning rate at another batch size, by the optimizer's scaling rule."""
    return float(scaled_lr(batch, lr=rate, base_batch=base_batch, rule=Optimizer(optimizer).scaling))


def _next_place(tried: Mapping[int, Cell], num_rates: int, *, is_upwards: bool) -> int | None:
    """Return the index of the rate to try next, a neighbour of the best rate; None if no neighbour is left to try.

    Args:
        tried: Runs by the index of their rate; an index outside ``range(num_rates)`` is an added rate.
        num_rates: Number of rates given.
        is_upwards: Whether to try the higher neighbour first. For optimizers with the square-root rule, the best rate
            grows faster than the rule at these batch sizes; for optimizers with the linear rule, more slowly.
    """
    lowest = min(tried)
    cells = [tried[place] for place in sorted(tried)]
    best = lowest + _best(cells)
    # a rate above one that diverged would diverge too
    higher = [best + 1] if tried[best].value is not None else []
    neighbours = [*higher, best - 1] if is_upwards else [best - 1, *higher]
    added = sum(not 0 <= place < num_rates for place in tried)
    may_add = num_rates > 1 and added < MOST_ADDED
    return next((n for n in neighbours if n not in tried and (0 <= n < num_rates or may_add)), None)


def _best(cells: Sequence[Cell]) -> int:
    """Return the index of the cell with the lowest value; failed runs count as infinite."""
    values = [math.inf if cell.value is None else cell.value for cell in cells]
    return values.index(min(values))


def _run_to_end(job: Job, folder: Path) -> Run:
    """Launch a run, wait until it completes or fails by itself, and return it. An interrupt stops the run.

    Raises:
        RunFailed: The run was killed at each of `MOST_ATTEMPTS` attempts.
        StudyError: The run was stopped by the user.
    """
    for _ in range(MOST_ATTEMPTS):
        run = launch(job, root=folder)
        run_to_end(run)
        if run.state == "stopped":
            raise StudyError(
                f"run {run.id} of the sweep was stopped; call the sweep again to continue with that run"
            )
        if run.state == "completed" or not was_killed(run):
            return run
    assert run.error is not None
    raise run.error


def _job(job: Job, optimizer: str, batch: int, rate: float, seed: int) -> Job:
    resized = apply(job, {"batch": batch})
    momentum = {"momentum": _MOMENTUM} if Optimizer(optimizer).settings.get("momentum") == 0 else {}
    return resized.replace(
        optimizer=Optimizer(optimizer, lr=rate, **momentum),
        lr_schedule=LRSchedule("cosine", warmup_steps=round(_WARMUP * resized.steps)),
        seed=seed, eval_every=None, record=_RECORD, name=f"{optimizer}-{batch}",
    )  # fmt: skip


def _check(
    job: Job, batches: PowersOfTwo, optimizers: Sequence[str], seeds: Sequence[int], factors: Sequence[float]
) -> None:  # fmt: skip
    if not isinstance(batches, PowersOfTwo):
        raise SpecError(
            f"batches={quoted(batches)} is not a range of batch sizes; give for example PowersOfTwo(32, 1024)"
        )
    if not seeds or not optimizers or not factors:
        raise SpecError(
            f"seeds={list(seeds)}, optimizers={list(optimizers)} and factors={list(factors)} leave nothing to run; "
            "give at least one of each"
        )
    if len(seeds) == 1 and len(factors) > 1:
        raise SpecError(
            f"seeds={list(seeds)} leave none for the median, because the first seed only selects one of {len(factors)} "
            "learning rates; give at least 2 seeds, or one factor"
        )
    for batch in batches.ends():
        for optimizer in optimizers:
            resized = checked_rows(_job(job, optimizer, int(str(batch)), 1.0, 0))
    if resized.steps < 2:
        raise SpecError(
            f"batches.high={batches.high} leaves only {resized.steps} step, because every run trains on the samples of "
            f"{job.steps} steps at batch size {job.batch.global_batch}; use more steps, or a smaller batch size"
        )


def _digest(job: Job, rates: Mapping[str, float], quality: str) -> str:
    asked = json.dumps([job.model_dump_json(), sorted(rates.items()), quality, "validation"])
    return sha256(asked.encode()).hexdigest()[:12]


def _claim(path: Path, asked: str, name: str | None) -> None:
    """Raise `StudyError` if the folder holds a sweep with different arguments; else store this sweep's digest."""
    if path.exists() and path.read_text() != asked:
        raise StudyError(
            f"name={name!r} belongs to a sweep with a different job, quality or learning rates, or from a version that "
            "compared rates on the test split; choose another name, or omit it"
        )
    path.write_text(asked)


def _append(path: Path, cell: Cell) -> None:
    line = f"\n{json.dumps(asdict(cell))}\n"  # the leading newline ends a partial line left by a killed sweep
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
        file.write(line)


def _load(path: Path) -> dict[tuple[str, int, float, int], Cell]:
    """Return the cells of all complete lines; a partial line is skipped, so its run is repeated."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            cell = Cell(**json.loads(line))
            found[cell.optimizer, cell.batch, cell.rate, cell.seed] = cell
    return found
