"""Population based training against random search, at equal compute: as many members, as many steps, the same draws.

    python tests/benchmarks/population.py                     both tasks, three seeds: some minutes
    python tests/benchmarks/population.py --task digits --seeds 0

Random search trains the very settings that the population starts with, each to the end. So what the population gains or
loses, it does by exploiting and exploring. Both report their best member's loss and accuracy on the held-back split, by
whose loss both also choose it. The defaults are one run of the job as it is, an eighth of the compute. Real runs at 2
ranks; the seconds hold for the machine as it was, and include what it takes to start an interval's runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from shardscope.runtime import shut_down

MEMBERS, INTERVALS, INTERVAL_STEPS = 8, 5, 20
SPACE: dict[str, Any] = {
    "optimizer.lr": (1e-4, 1e-1, "log"),
    "optimizer.weight_decay": (1e-4, 1.0, "log"),
    "clip_norm": (0.1, 10.0, "log"),
}
TASKS = {"digits": ("mlp", "digits", 64), "text": ("gpt-nano", "python-source", 8)}
"""Model, data, global batch."""


@dataclass(frozen=True)
class Found:
    """Where a search ended."""

    loss: float
    accuracy: float
    seconds: float
    settings: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    steps = INTERVALS * INTERVAL_STEPS
    print(f"{MEMBERS} members of {steps} steps each, {MEMBERS * steps} steps a search; {INTERVALS} intervals")
    for task in options.task:
        print(f"\n{task}: held-back loss (accuracy) of the best member\n")
        print(
            f"{'seed':>4}  {'defaults':>16}  {'random search':>16}  {'population':>16}  {'change':>7}  seconds r / p"
        )
        sum_up([change(seed, *one(task, seed)) for seed in options.seeds])
    shut_down()


def one(task: str, seed: int) -> tuple[Found, Found, Found]:
    """The defaults, random search and a population, of one seed."""
    model, data, batch = TASKS[task]
    quiet = ss.Record(spans_first=0, spans_every=10**6, memory_first=0, memory_every=None)
    job = ss.Job(
        model=model, data=data, batch=batch, seed=seed, optimizer="adamw", steps=INTERVALS * INTERVAL_STEPS,
        record=quiet,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run = ss.launch(job, root=folder).wait()
        summary = run.summary()
        assert summary.test_loss is not None
        assert summary.test_accuracy is not None
        usual = Found(summary.test_loss, summary.test_accuracy, time.perf_counter() - started, "defaults")
        return usual, search(job, seed, 1, folder), search(job, seed, INTERVALS, folder)


def search(job: ss.Job, seed: int, intervals: int, folder: str) -> Found:
    """A population of so many intervals; of one, it is random search."""
    started = time.perf_counter()
    population = ss.train_population(
        job, SPACE, members=MEMBERS, intervals=intervals, seed=seed, objectives=("loss",),
        folder=Path(folder) / f"in-{intervals}",
    )  # fmt: skip
    best, seconds = population.best, time.perf_counter() - started
    summary = population.run(best).summary()
    assert best.outcome is not None
    assert best.outcome.scores is not None
    assert summary.test_accuracy is not None
    failed = sum(entry.outcome is not None and entry.outcome.scores is None for entry in population.entries())
    said = ", ".join(f"{path} {value:.3g}" for path, value in best.move.settings.items())
    return Found(
        best.outcome.scores["loss"],
        summary.test_accuracy,
        seconds,
        f"{said}{f' ({failed} failed)' if failed else ''}",
    )


def change(seed: int, usual: Found, drawn: Found, trained: Found) -> float:
    """The population's loss against random search's in percent, printed with what it is made of."""
    cells = [f"{found.loss:.4f} ({100 * found.accuracy:.1f} %)" for found in (usual, drawn, trained)]
    percent = 100 * (trained.loss / drawn.loss - 1)
    print(
        f"{seed:>4}  {cells[0]:>16}  {cells[1]:>16}  {cells[2]:>16}  {percent:>+6.1f}%"
        f"  {drawn.seconds:.0f} / {trained.seconds:.0f}"
    )
    print(f"      random search found {drawn.settings}")
    print(f"      the population ended at {trained.settings}", flush=True)
    return percent


def sum_up(changes: list[float]) -> None:
    """What they come to over the seeds."""
    spread = f" ± {stdev(changes):.1f} (standard deviation over seeds)" if len(changes) > 1 else ""
    lower, equal = sum(percent < 0 for percent in changes), sum(percent == 0 for percent in changes)
    print(f"the population's loss is {mean(changes):+.1f} %{spread} off random search's;", end=" ")
    print(f"lower in {lower}, equal in {equal} of {len(changes)}", flush=True)


if __name__ == "__main__":
    main()
