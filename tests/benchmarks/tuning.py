"""Trials a minute: `ss.tune` on warm ranks against the same study with one `torchrun` launch a trial.

python tests/benchmarks/tuning.py [rounds] [trials]

Both ask the same sampler with the same seed for the same settings and tell it the same figure, so their trials are the
same in number, sequence and result; that they are is checked, to the last bit of every loss. The two take turns, round
by round, in changing order; the first round warms both up and is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from shardscope.tuning.apply import apply
from shardscope.tuning.samplers import sampler_of

SPACE = {
    "optimizer": ["adamw", "nesterov", "lamb"],
    "optimizer.lr": (1e-3, 1e-1, "log"),
    "warmup": (0.0, 0.3),
}
Trials = list[tuple[dict[str, object], float]]


def tuned(job: ss.Job, trials: int, seed: int, root: Path) -> Trials:
    """The study by `ss.tune`."""
    study = ss.tune(
        job, SPACE, trials=trials, objectives=["loss"], seed=seed, name="tuned", baselines=False, root=root
    )
    return [(trial.params, trial.value) for trial in study.trials]


def launched(job: ss.Job, trials: int, seed: int, root: Path) -> Trials:
    """The same study, each trial by a `torchrun` of its own."""
    study = optuna.create_study(sampler=sampler_of("tpe", seed=seed, num_objectives=1))
    for number in range(trials):
        trial = study.ask()
        params = {
            "optimizer": trial.suggest_categorical("optimizer", ["adamw", "nesterov", "lamb"]),
            "warmup": trial.suggest_float("warmup", 0.0, 0.3),
            "optimizer.lr": trial.suggest_float("optimizer.lr", 1e-3, 1e-1, log=True),
        }
        trial.set_constraint("possible", 0.0)
        study.tell(trial, by_torchrun(apply(job, params), root / f"trial-{number}"))
    return [(trial.params, trial.value) for trial in study.trials]


def by_torchrun(job: ss.Job, folder: Path) -> float:
    """The loss on held-back data of one run."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={job.world_size}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    worker = [
        "-m",
        "shardscope.runtime.worker",
        "--job",
        str(folder / "job.json"),
        "--run-dir",
        str(folder / "run"),
    ]
    done = subprocess.run(
        [*command, *rendezvous, *worker], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        sys.exit(
            f"torchrun ended with status {done.returncode} in {folder}:\n{done.stderr}{_errors(folder / 'run')}"
        )
    return ss.Run.attach(folder / "run").events("eval")[-1]["loss"]


def _errors(run: Path) -> str:
    """What the ranks wrote down of why they failed."""
    lines = [line for path in sorted(run.glob("rank-*.jsonl")) for line in path.read_text().splitlines()]
    return "".join(f"{line}\n" for line in lines if '"error"' in line)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    trials = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds of {trials} trials"
    )
    for world_size in (2, 4):
        job = ss.Job(
            model="mlp", data="digits", strategy="ring", world_size=world_size, steps=20, eval_every=20
        )
        per_minute: dict[str, list[float]] = {"ss.tune": [], "torchrun": []}
        for number in range(rounds + 1):
            seconds = one_round(job, trials, number)
            for name, took in seconds.items():
                if number:
                    per_minute[name].append(60 * trials / took)
        medians = {name: statistics.median(values) for name, values in per_minute.items()}
        ratios = [a / b for a, b in zip(*per_minute.values(), strict=True)]
        print(
            f"{world_size} ranks, trials a minute: " + ", ".join(f"{n} {m:.1f}" for n, m in medians.items())
        )
        print(f"  ratio {statistics.median(ratios):.1f} (of rounds: {', '.join(f'{r:.1f}' for r in ratios)})")
    ss.runtime.shut_down()


def one_round(job: ss.Job, trials: int, number: int) -> dict[str, float]:
    """Seconds of either study; their results are equal."""
    ways = {"ss.tune": tuned, "torchrun": launched}
    seconds, results = {}, {}
    for name in sorted(ways, reverse=number % 2 == 1):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            results[name] = ways[name](job, trials, number, Path(folder))
            seconds[name] = time.perf_counter() - begun
    assert results["ss.tune"] == results["torchrun"], results
    return {name: seconds[name] for name in ways}


if __name__ == "__main__":
    main()
