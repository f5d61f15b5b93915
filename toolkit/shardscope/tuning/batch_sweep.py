"""Batch-size sweep: the largest batch at which each optimizer still reaches a target in the same number of epochs.

    sweep = batch_sweep(job, batches=PowersOfTwo(32, 1024), target=0.1)
    sweep.largest("lamb")

All runs train on the same number of samples, so larger batches take fewer steps. Each optimizer gets the same number
of runs at each batch size. First, a few learning rates around the one from the optimizer's scaling rule (linear for
SGD and LARS, Goyal et al. 2017; square root for AdamW and LAMB, You et al. 2020) are run with the first seed and
compared on the validation split. Then the best rate is run with the other seeds, and the median of those runs is the
result. The first seed is excluded because its value is the minimum over several rates, which is biased low.
A sweep that was stopped can be resumed: completed runs are not repeated.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Literal

from shardscope.analytic.large_batch import scaled_lr
from shardscope.errors import RunFailed, SpecError, StudyError
from shardscope.runtime import Run, launch
from shardscope.spec import Job, LRSchedule, Optimizer
from shardscope.spec.space import PowersOfTwo
from shardscope.tuning.apply import apply
from shardscope.tuning.driver import MOST_ATTEMPTS, was_killed
from shardscope.tuning.measured import TrialReader
from shardscope.tuning.objectives import QUALITIES
from shardscope.tuning.storage import folder_of

OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")
FACTORS = (0.25, 1.0, 4.0)
"""Learning rates to try, as multiples of the rate from the scaling rule, which is only a starting point."""
_WARMUP = 0.1
_LEEWAY = 1.25
_MOMENTUM = 0.9
"""Momentum for optimizers whose default momentum is 0, as is usual for SGD with large batches."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep; `value` is None if the run failed, for example because it diverged."""

    optimizer: str
    batch: int
    rate: float
    seed: int
    value: float | None
    steps: int
    reason: str | None = None


@dataclass(frozen=True)
class SweepPoint:
    """One optimizer at one batch size: the best learning rate, and its value with each seed that did not fail.

    The seed used to choose the rate is excluded, unless there was only one rate to choose from.
    """

    optimizer: str
    batch: int
    steps: int
    rate: float
    values: tuple[float, ...]
    num_seeds: int

    @property
    def median(self) -> float:
        """Median value over all seeds; infinite if too many of them failed."""
        failed = self.num_seeds - len(self.values)
        return median([*self.values, *[math.inf] * failed])

    def reaches(self, target: float) -> bool:
        """Return whether the median over seeds is finite and at most the target."""
        return math.isfinite(self.median) and self.median <= target


@dataclass(frozen=True)
class BatchSweep:
    """Result of a batch-size sweep."""

    job: Job
    quality: str
    target: float
    points: tuple[SweepPoint, ...]

    def largest(self, optimizer: str) -> int | None:
        """Return the largest batch size up to which all sizes reach the target; None if the smallest misses it."""
        largest = None
        for point in sorted((p for p in self.points if p.optimizer == optimizer), key=lambda p: p.batch):
            if not point.reaches(self.target):
                break
            largest = point.batch
        return largest

    def __str__(self) -> str:
        lines = [f"Largest batch that reaches {self.quality} {self.target:.4g} in the same epochs:"]
        for name in dict.fromkeys(point.optimizer for point in self.points):
            found = self.largest(name)
            lines.append(f"  {name:9} {found if found is not None else 'none of those tried'}")
        return "\n".join(lines)


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
) -> BatchSweep:
    """Find the largest batch at which each optimizer still reaches a target in the same number of epochs.

    Args:
        job: What to train. Every run trains on as many samples as this job.
        batches: Batch sizes to try.
        target: Value to reach on the validation split. None takes the worst (highest) finite median among the
            optimizers at the smallest batch size, times 1.25: seeds alone change the value by a tenth or more.
        quality: ``loss``, or ``error`` (the fraction of wrong answers).
        optimizers: Names of the optimizers to compare.
        rates: Learning rates by optimizer name, for the job's batch size; None takes each optimizer's default rate.
        factors: Learning rates to try at each batch size, as multiples of the rate from the scaling rule.
        seeds: Seeds of the runs. The first one chooses the rate and the others give the median. If `factors` has only
            one entry, there is nothing to choose and all seeds count.
        name: Name of the sweep, under which completed runs are found again; derived from the arguments by default.
        root: Folder of the runs; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
        on_cell: Called with the `Cell` of each run after it ends.

    Raises:
        SpecError: A batch size is impossible or leaves fewer than 2 steps, or no seed is left for the median.
        StudyError: A sweep with this name exists with other arguments or from an earlier version, or one of its runs
            was stopped by the user.
    """
    if quality not in QUALITIES:
        raise SpecError(f"quality={quality!r} is not measured; use 'loss' or 'error'")
    _check(job, batches, optimizers, seeds, factors)
    usual = {**{n: Optimizer(name=n).lr for n in optimizers}, **(rates or {})}
    asked = _digest(job, usual, quality)
    folder = folder_of(name or f"batches-{asked}", root)
    _claim(folder / "asked", asked, name)
    known = _load(folder / "cells.jsonl")
    points = []
    for optimizer in optimizers:
        for batch in (2**e for e in range(batches.exponents[0], batches.exponents[1] + 1)):
            base = job.batch.global_batch
            rule = Optimizer(optimizer).scaling
            middle = float(scaled_lr(batch, lr=usual[optimizer], base_batch=base, rule=rule))
            plan = _Plan(job, optimizer, batch, quality, folder, known, on_cell)
            points.append(plan.point([middle * factor for factor in factors], seeds))
    return BatchSweep(job, quality, _reached_by_all(points) if target is None else target, tuple(points))


def _reached_by_all(points: Sequence[SweepPoint]) -> float:
    smallest = min(point.batch for point in points)
    medians = [p.median for p in points if p.batch == smallest and math.isfinite(p.median)]
    return _LEEWAY * max(medians) if medians else math.inf


@dataclass(frozen=True)
class _Plan:
    """The runs of one optimizer at one batch size."""

    job: Job
    optimizer: str
    batch: int
    quality: str
    folder: Path
    known: dict[tuple[str, int, float, int], Cell]
    on_cell: Callable[[Cell], None] | None

    def point(self, rates: Sequence[float], seeds: Sequence[int]) -> SweepPoint:
        tried = [self._cell(rate, seeds[0]) for rate in rates]
        best = min(tried, key=lambda cell: math.inf if cell.value is None else cell.value)
        cells = [self._cell(best.rate, seed) for seed in (seeds[1:] if len(rates) > 1 else seeds)]
        values = tuple(cell.value for cell in cells if cell.value is not None)
        return SweepPoint(self.optimizer, self.batch, best.steps, best.rate, values, len(cells))

    def _cell(self, rate: float, seed: int) -> Cell:
        key = (self.optimizer, self.batch, rate, seed)
        if key not in self.known:
            self.known[key] = self._run(rate, seed)
            _append(self.folder / "cells.jsonl", self.known[key])
            if self.on_cell is not None:
                self.on_cell(self.known[key])
        return self.known[key]

    def _run(self, rate: float, seed: int) -> Cell:
        job = _job(self.job, self.optimizer, self.batch, rate, seed)
        run = _to_its_end(job, self.folder / "trials")
        if run.error is not None:
            reason = str(run.error).splitlines()[0]
            return Cell(self.optimizer, self.batch, rate, seed, None, job.steps, reason)
        value = TrialReader(run).poll().objective(self.quality, job.steps)
        finite = value is not None and math.isfinite(value)
        return Cell(self.optimizer, self.batch, rate, seed, value if finite else None, job.steps)


def _to_its_end(job: Job, folder: Path) -> Run:
    """Launch a run, wait until it completes or fails by itself, and return it. An interrupt stops the run.

    Raises:
        RunFailed: The run was killed at each of `MOST_ATTEMPTS` attempts.
        StudyError: The run was stopped by the user.
    """
    for attempt in range(MOST_ATTEMPTS):
        run = launch(job, root=folder)
        try:
            run.wait()
        except RunFailed:
            if not was_killed(run):
                return run
            if attempt + 1 == MOST_ATTEMPTS:
                raise
        except BaseException:
            run.stop()
            raise
        if run.state == "completed":
            return run
        if run.state == "stopped":
            raise StudyError(
                f"run {run.id} of the sweep was stopped; call the sweep again to resume with that run"
            )
    raise AssertionError


def _job(job: Job, optimizer: str, batch: int, rate: float, seed: int) -> Job:
    resized = apply(job, {"batch": batch})
    momentum = {"momentum": _MOMENTUM} if Optimizer(optimizer).settings.get("momentum") == 0 else {}
    return resized.replace(
        optimizer=Optimizer(optimizer, lr=rate, **momentum),
        lr_schedule=LRSchedule("cosine", warmup_steps=round(_WARMUP * resized.steps)),
        seed=seed, eval_every=None, name=f"{optimizer}-{batch}",
    )  # fmt: skip


def _check(
    job: Job, batches: PowersOfTwo, optimizers: Sequence[str], seeds: Sequence[int], factors: Sequence[float]
) -> None:  # fmt: skip
    if not seeds or not optimizers or not factors:
        raise SpecError(
            f"seeds={list(seeds)}, optimizers={list(optimizers)} and factors={list(factors)} leave nothing to run; "
            "give at least one of each"
        )
    if len(seeds) == 1 and len(factors) > 1:
        raise SpecError(
            f"seeds={list(seeds)} leave none for the median, as the first one chooses among {len(factors)} rates; "
            "give at least 2 seeds, or one factor"
        )
    for batch in batches.ends():
        for optimizer in optimizers:
            resized = _job(job, optimizer, int(str(batch)), 1.0, 0)
    if resized.steps < 2:
        raise SpecError(
            f"batches.high={batches.high} leaves {resized.steps} step of {job.steps} at batch "
            f"{job.batch.global_batch}; use more steps, or a smaller batch"
        )


def _digest(job: Job, rates: Mapping[str, float], quality: str) -> str:
    asked = json.dumps([job.model_dump_json(), sorted(rates.items()), quality, "validation"])
    return sha256(asked.encode()).hexdigest()[:12]


def _claim(path: Path, asked: str, name: str | None) -> None:
    """Raise `StudyError` if the folder holds a sweep with other arguments; else record this sweep's digest in it."""
    if path.exists() and path.read_text() != asked:
        raise StudyError(
            f"name={name!r} is a sweep of another job, quality or other rates, or of a version that compared rates on "
            "the test split; give this one another name, or none"
        )
    path.write_text(asked)


def _append(path: Path, cell: Cell) -> None:
    line = f"\n{json.dumps(asdict(cell))}\n"  # the leading newline ends a partial line left by a killed sweep
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
        file.write(line)


def _load(path: Path) -> dict[tuple[str, int, float, int], Cell]:
    found = {}
    for cell in _cells(path):
        found[cell.optimizer, cell.batch, cell.rate, cell.seed] = cell
    return found


def _cells(path: Path) -> Iterator[Cell]:
    """Yield the cells of all complete lines; a partial line is skipped, so its run is repeated."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield Cell(**json.loads(line))
        except (ValueError, TypeError):
            continue
