"""Where compressed training ends, against the uncompressed run of the same seed: every method, optimizer and task.

    python tests/benchmarks/convergence.py                                    everything, hours
    python tests/benchmarks/convergence.py --task digits --optimizer sgd --method topk randomk
    python tests/benchmarks/convergence.py --show                             only the table of what there is

Real runs at 2 ranks from warm workers. Each result is appended to a JSON file as soon as it is there, so that this can
be done in pieces; what the file has is not run again. What is compared is the accuracy on held-back digits, in points,
and the loss on held-back text, relative. The tolerances below were written down before the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from shardscope.errors import RunFailed, SpecError
from shardscope.runtime import shut_down
from shardscope.spec.registry import names

SEEDS = (0, 1, 2)
RANKS = 2
RATES = {
    "digits": {"sgd": 0.3, "nesterov": 0.1, "adamw": 3e-3, "lamb": 5e-3, "lars": 1.0},
    "gpt": {"sgd": 0.1, "nesterov": 0.1, "adamw": 3e-3, "lamb": 5e-2, "lars": 10.0},
}
"""Learning rates, falling as a cosine after a tenth of warm-up: at or near the best of three uncompressed runs of seed
0 (AdamW on text: the usual one, not searched). Compressed runs get no others."""
TASKS = {"digits": ("mlp", "digits", 64, 300), "gpt": ("gpt-nano", "python-source", 32, 200)}
"""Model, data, global batch, steps."""
TOLERANCES = {
    0.005: ("fp16", "bf16", "fp8", "int8"),
    0.01: ("int4", "qsgd", "natural"),
    0.02: ("terngrad", "powersgd", "adaptive-bits", "adaptive-rank", "onebit-adam", "onebit-lamb"),
    0.03: ("sign", "sign-vote", "topk", "dgc", "randomk", "randomblock", "local-sgd"),
}
"""How much worse the mean over seeds may be: points of accuracy over 100, or relative loss."""


def methods(steps: int) -> list[ss.Compression]:
    """Every method that can run, as it is by default and, where that brings a short run nearer, with a warm-up."""
    fifth = steps // 5
    special: dict[str, list[dict[str, Any]]] = {
        "topk": [{}, {"ratio": 0.1}],
        "randomk": [{}, {"ratio": 0.1}, {"ratio": 0.1, "feedback": False}],
        "randomblock": [{}, {"ratio": 0.1}],
        "dgc": [{"ratio": 0.01, "warmup_steps": fifth}],
        "powersgd": [{}, {"warmup_steps": fifth}, {"rank": 8}],
        "adaptive-rank": [{}, {"warmup_steps": fifth}],
        "onebit-adam": [{}, {"warmup_steps": 2 * fifth}],
        "sign": [{}, {"feedback": False}],
    }
    return [
        ss.Compression(name, **given)
        for name in names(ss.Compression)
        if name != "none"
        for given in special.get(name, [{}])
    ]


@dataclass(frozen=True)
class Result:
    """Where one run ended: loss and accuracy on what was held back, or the reason why it failed."""

    task: str
    optimizer: str
    compression: str
    name: str
    seed: int
    steps: int
    loss: float | None
    accuracy: float | None
    bytes_per_step: float | None
    error: str | None

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What makes a run worth running once."""
        return self.task, self.optimizer, self.compression, self.seed, self.steps

    @property
    def score(self) -> float | None:
        """What is compared between runs, the lower the better; None of a run that failed."""
        if self.loss is None or self.accuracy is None:
            return None
        return 1 - self.accuracy if self.task == "digits" else self.loss


def job_of(task: str, optimizer: str, compression: ss.Compression, seed: int, steps: int) -> ss.Job:
    """The job of one run.

    Raises:
        SpecError: The method does not go with the optimizer.
    """
    model, data, batch, _ = TASKS[task]
    settings = {"momentum": 0.0} if _keeps_momentum(compression) and optimizer in {"sgd", "lars"} else {}
    return ss.Job(
        model=model, data=data, strategy="all-reduce", world_size=RANKS, batch=batch, steps=steps, seed=seed,
        optimizer=ss.Optimizer(optimizer, lr=_rate(task, optimizer, compression), **settings),
        lr_schedule=ss.LRSchedule("cosine", warmup_steps=steps // 10), compression=compression,
        name=f"convergence {task}",
    )  # fmt: skip


def _keeps_momentum(compression: ss.Compression) -> bool:
    return compression.name == "dgc" and bool(compression.settings["momentum"])


def _rate(task: str, optimizer: str, compression: ss.Compression) -> float:
    """The optimizer's, such that steps are as long as before where the method takes the momentum over.

    SGD without momentum gets one, which makes steps longer; LARS, which gives every step its length, loses its own.
    """
    rate = RATES[task][optimizer]
    if not _keeps_momentum(compression):
        return rate
    left = 1 - float(compression.settings["momentum"])
    return rate * left if optimizer == "sgd" else rate / left


def run_one(task: str, optimizer: str, compression: ss.Compression, seed: int, steps: int) -> Result:
    """One training from beginning to end; a run that fails is a result too."""
    run = ss.launch(job_of(task, optimizer, compression, seed, steps))
    error = None
    try:
        run.wait()
    except RunFailed as failed:
        error = str(failed).splitlines()[0][:200]
    summary = run.summary()
    ended = error is None
    return Result(
        task, optimizer, compression.label, compression.name, seed, steps,
        summary.test_loss if ended else None, summary.test_accuracy if ended else None, summary.bytes_per_step, error,
    )  # fmt: skip


def wanted(arguments: argparse.Namespace) -> Iterator[tuple[str, str, ss.Compression, int, int]]:
    """What the options ask for, the uncompressed run of each seed first."""
    for task in arguments.task:
        steps = arguments.steps or TASKS[task][3]
        chosen = [c for c in methods(steps) if not arguments.method or c.name in arguments.method]
        for optimizer in arguments.optimizer:
            for compression in [ss.Compression("none"), *chosen]:
                try:
                    job_of(task, optimizer, compression, 0, steps)
                except SpecError:
                    continue  # the method does not go with this optimizer, and the job says so
                for seed in range(arguments.seeds):
                    yield task, optimizer, compression, seed, steps


def load(path: Path) -> list[Result]:
    """What has been run already."""
    return [Result(**row) for row in json.loads(path.read_text())] if path.exists() else []


def save(path: Path, results: Sequence[Result]) -> None:
    """All at once, so that an interruption leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([asdict(result) for result in results], indent=1))
    fresh.replace(path)


@dataclass(frozen=True)
class Line:
    """One method under one optimizer, over the seeds."""

    task: str
    optimizer: str
    compression: str
    score: float | None
    excess: float | None
    spread: float
    tolerance: float
    times_fewer_bytes: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the mean excess is within the tolerance."""
        if self.excess is None:
            return "FAILED TO RUN"
        return "within" if self.excess <= self.tolerance else "OUTSIDE"


def lines(results: Sequence[Result]) -> list[Line]:
    """Every method against the uncompressed runs of the same task, optimizer, steps and seeds."""
    plain = {(r.task, r.optimizer, r.seed, r.steps): r for r in results if r.name == "none"}
    groups: dict[tuple[str, str, str, int], list[Result]] = {}
    for result in results:
        if (result.task, result.optimizer, result.seed, result.steps) in plain:
            groups.setdefault((result.task, result.optimizer, result.compression, result.steps), []).append(
                result
            )
    return [
        _line(rows, [plain[row.task, row.optimizer, row.seed, row.steps] for row in rows])
        for rows in groups.values()
    ]


def _line(rows: Sequence[Result], plain: Sequence[Result]) -> Line:
    first = rows[0]
    tolerance = 0.0 if first.name == "none" else _tolerance(first.name)
    scores = [row.score for row in rows if row.score is not None]
    excesses = [_excess(row, base) for row, base in zip(rows, plain, strict=True)]
    known = [excess for excess in excesses if excess is not None]
    complete = len(known) == len(rows)
    fewer = [b.bytes_per_step / r.bytes_per_step for r, b in zip(rows, plain, strict=True)
             if r.bytes_per_step and b.bytes_per_step]  # fmt: skip
    return Line(
        first.task, first.optimizer, first.compression, mean(scores) if scores else None,
        mean(known) if complete else None, stdev(known) if len(known) > 1 else 0.0, tolerance,
        mean(fewer) if fewer else None, len(rows),
    )  # fmt: skip


def _tolerance(name: str) -> float:
    """Of a method.

    Raises:
        SpecError: Nobody has written one down.
    """
    found = next((value for value, names in TOLERANCES.items() if name in names), None)
    if found is None:
        raise SpecError(
            f"how much worse {name!r} may end is not written down; add it to TOLERANCES in {__file__}, before it runs"
        )
    return found


def _excess(row: Result, plain: Result) -> float | None:
    if row.score is None or plain.score is None:
        return None
    return row.score - plain.score if row.task == "digits" else row.score / plain.score - 1


def table(results: Sequence[Result]) -> str:
    """As text. Digits: error rate; text: loss. The spread is the standard deviation of the excess over the seeds."""
    head = (
        f"{'task':7} {'optimizer':9} {'method':38} {'score':>8} {'excess %':>9} {'spread':>7} {'tol %':>6} {'bytes':>7}"
        "  verdict"
    )
    return "\n".join([head, *map(_text, lines(results))])


def _text(line: Line) -> str:
    score = "-" if line.score is None else f"{line.score:.4f}"
    excess = "-" if line.excess is None else f"{100 * line.excess:+.2f}"
    fewer = "-" if line.times_fewer_bytes is None else f"{line.times_fewer_bytes:.1f}x"
    verdict = "" if line.compression == "none" else line.verdict
    return (
        f"{line.task:7} {line.optimizer:9} {line.compression:38} {score:>8} {excess:>9} {100 * line.spread:7.2f} "
        f"{100 * line.tolerance:6.1f} {fewer:>7}  {verdict} ({line.seeds} seeds)"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizer", nargs="+", choices=RATES["digits"], default=list(RATES["digits"]))
    parser.add_argument(
        "--method", nargs="+", choices=names(ss.Compression), help="by default every method there is"
    )
    parser.add_argument("--steps", type=int, help="of each run (default: 300 and 200)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--file", type=Path, default=Path("runs/convergence.json"))
    parser.add_argument("--show", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, then print the table."""
    arguments = parse(argv)
    for name in arguments.method or names(ss.Compression):
        if name != "none":
            _tolerance(name)
    results = load(arguments.file)
    known = {result.key for result in results}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDSCOPE_RUNS"] = folder
        for task, optimizer, compression, seed, steps in [] if arguments.show else wanted(arguments):
            if (task, optimizer, compression.label, seed, steps) in known:
                continue
            results = [*results, run_one(task, optimizer, compression, seed, steps)]
            save(arguments.file, results)
            print(f"{task} {optimizer} {compression.label} seed {seed}: {results[-1].score}", flush=True)
        shut_down()
    print(table(results))


if __name__ == "__main__":
    main()
