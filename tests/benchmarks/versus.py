"""This checkout against another one: how long the same calls take, interleaved, with 95 % intervals of the ratio.

Run it as ``python tests/benchmarks/versus.py PATH [rounds] [name ...]``, where PATH is a checkout of another commit
whose dependencies are the same. Each checkout runs in one process of its own, which stays warm; the two take turns.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[2]
TIMES = {"import": 2, "warm launch": 2, "ring step": 2, "zero-3 step": 2, "trial": 2}
"""How often a round measures each; one that is not listed, four times."""


def measures() -> dict[str, Callable[[], float]]:
    """Functions that measure once and return seconds, by name."""
    import shardscope as ss
    from shardscope_widgets import MemoryCalculator

    os.environ["SHARDSCOPE_RUNS"] = tempfile.mkdtemp()
    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=2, steps=60, batch=8)
    cluster = ss.Cluster.of("a100-80gb", nodes=128, per_node=8)
    layout = ss.Layout(data=16, tensor=8, pipeline=8, global_batch=1536)
    calculator = MemoryCalculator(zero=1)
    return {
        "import": lambda: timed(
            lambda: subprocess.run([sys.executable, "-c", "import shardscope"], check=True)
        ),
        "warm launch": lambda: timed(
            lambda: ss.launch(job.replace(model="mlp", data="digits", steps=1)).wait()
        ),
        "ring step": lambda: step(ss, job),
        "zero-3 step": lambda: step(ss, job.replace(strategy="zero-3")),
        "trial": lambda: (
            timed(lambda: ss.tune(job.replace(model="mlp", data="digits", steps=2), trials=4)) / 4
        ),
        "slider": lambda: float(
            np.median([timed(lambda: press(calculator), time.process_time) for _ in range(9)])
        ),
        "predict a job": lambda: timed(lambda: ss.predict(job).step_time_s),
        "predict a layout": lambda: timed(lambda: ss.predict("gpt3-175b", cluster, layout).step_time_s),
        "str(predict(layout))": lambda: timed(lambda: str(ss.predict("gpt3-175b", cluster, layout))),
    } | planner_measures()


def planner_measures() -> dict[str, Callable[[], float]]:
    """A whole search, and memory and time of 2**18 layouts, neighbours or drawn at random."""
    planner = importlib.import_module("planner")
    setting = planner.trillion()

    def candidates() -> Any:
        return planner.candidates(
            setting.model, setting.cluster, global_batch=3072, space=planner.SearchAxes()
        )

    found = candidates()
    body, way = planner.rows(found, 1 << 18)
    every = found.ways[found.bodies.grid].nonzero()
    middle = slice(len(every[0]) // 2, len(every[0]) // 2 + (1 << 18))
    return {
        "neighbours": lambda: timed(
            lambda: planner.score(setting, found, every[0][middle], every[1][middle])
        ),
        "at random": lambda: timed(lambda: planner.score(setting, found, body, way)),
        "whole space": lambda: timed(lambda: planner.search(setting, candidates(), keep=20)),
    }


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started


def step(ss: Any, job: Any) -> float:
    """Median seconds of a step, without the first ten."""
    run = ss.launch(job)
    run.wait()
    ends = [event["t"] for event in run.events("step") if event["rank"] == 0]
    return float(np.median(np.diff(ends[10:])))


def press(calculator: Any) -> None:
    """Move the slider of data-parallel ranks there and back."""
    calculator.data = 64
    calculator.data = 32


def serve() -> None:
    """Measure what each line of standard input names, and answer with a line of seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    found = measures()
    print(json.dumps(list(found)), file=answers, flush=True)
    for line in sys.stdin:
        print(found[line.strip()](), file=answers, flush=True)


def start(root: Path) -> subprocess.Popen[str]:
    """Start the process that measures the checkout at `root`, with the benchmarks that belong to it."""
    path = os.pathsep.join(str(root / part) for part in ("toolkit", "widgets", "tests/benchmarks"))
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import versus; versus.serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def ask(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main(other: str, rounds: str = "10", *names: str) -> None:
    """Print medians, ratios (this checkout over the other) and their intervals."""
    sides = [start(Path(other).resolve()), start(HERE)]
    found = [json.loads(side.stdout.readline()) for side in sides if side.stdout is not None]
    for name in names or found[1]:
        seconds: list[list[float]] = [[], []]
        for number in range(TIMES.get(name, 4) * int(rounds) + 1):
            for index in (0, 1) if number % 2 else (1, 0):
                seconds[index].append(ask(sides[index], name))
        before, now = (np.array(side[1:]) for side in seconds)  # the first warms up
        low, high = interval(now / before)
        print(
            f"{name:<22}{1e3 * np.median(before):10.2f} -> {1e3 * np.median(now):8.2f} ms   "
            f"ratio {np.median(now / before):.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )
    for side in sides:
        side.communicate()  # closes its input, which ends it


if __name__ == "__main__":
    main(*sys.argv[1:])
