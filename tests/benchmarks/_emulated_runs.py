"""Runs on emulated clusters, measured over several sessions, against their predictions and simulations.

`measure` runs one job after another and appends a line of JSON for each to a file, until all have run three times or
the seconds are over; called again, it goes on. `results` predicts and simulates each job again, so that a change of the
formulas needs no new runs.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import shardscope as ss
from shardscope.errors import RunFailed

REPEATS = 3
PARTS = ("data", "forward", "backward", "optimizer", "codec", "communication", "idle")
JobOf = Callable[[], tuple[ss.Job, Any]]
"""Function that returns a job and its emulated cluster."""


def rows_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of a file by the name of their job."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        found.setdefault(row["key"], []).append(row)
    return found


def measure(
    file: Path, jobs: Mapping[str, JobOf], *, seconds: float = float("inf"), repeats: int = REPEATS
) -> None:
    """Run what has not run yet, in the order of `jobs`."""
    ends = time.monotonic() + seconds
    known = rows_of(file)
    for repeat, (key, job_of) in product(range(repeats), jobs.items()):
        if len(known.get(key, ())) > repeat:
            continue
        if time.monotonic() > ends:
            return
        job, cluster = job_of()
        try:
            run = ss.launch(job, cluster, made_by="grid").wait(300)
        except RunFailed as error:
            print(f"{key}: {error}", flush=True)
            continue
        summary = run.summary()
        row = {
            "key": key, "step_s": summary.step_time_s, "bytes": summary.bytes_per_step,
            "late_s": summary.late_s_per_step, "load": round(os.getloadavg()[0], 2),
            "terms": {row.term: row.measured for row in ss.compare(run).rows if row.group == "time"},
        }  # fmt: skip
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


class Result(NamedTuple):
    """One job's figures; errors are relative to the median of its runs."""

    key: str
    measured_s: float
    spread: float
    predicted: float
    simulated: float
    worst_term: str
    bytes_agree: bool
    is_inside: bool | None
    """Whether the measured time is in the prediction's 90 % interval; None if there is none."""

    @property
    def predicted_s(self) -> float:
        """Predicted step time, in seconds."""
        return self.measured_s * (1 + self.predicted)

    @property
    def simulated_s(self) -> float:
        """Simulated step time, in seconds."""
        return self.measured_s * (1 + self.simulated)


def results(file: Path, jobs: Mapping[str, JobOf]) -> list[Result]:
    """Predict and simulate each job that has run, and compare both with its runs."""
    known = rows_of(file)
    return [_result(key, job_of, known[key]) for key, job_of in jobs.items() if key in known]


def _result(key: str, job_of: JobOf, rows: list[dict[str, Any]]) -> Result:
    job, cluster = job_of()
    found = ss.predict(job, cluster)
    assert found.time is not None
    times = [row["step_s"] for row in rows]
    measured = statistics.median(times)
    spread = statistics.median(abs(each / measured - 1) for each in times) if len(times) > 1 else float("nan")
    terms = {
        name: statistics.median(row["terms"].get(name) or 0.0 for row in rows) for name in rows[0]["terms"]
    }
    top = {part.name: part.value for part in found.time.parts}
    gaps = {name: top.get(name, 0.0) - (terms.get(name) or 0.0) for name in {*top, *PARTS}}
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    interval = getattr(found, "interval", None)
    return Result(
        key, measured, spread, found.time.value / measured - 1,
        ss.simulate.predicted(found).step_time_s / measured - 1,
        f"{worst} {gaps[worst] / measured:+.0%}",
        bool(found.sent_bytes is not None and int(found.sent_bytes.sum()) == round(rows[0]["bytes"])),
        None if interval is None else interval[0] <= measured <= interval[1],
    )  # fmt: skip


def print_report(file: Path, found: Sequence[Result], groups: Iterable[str], *, width: int = 44) -> None:
    """Print a table of results, and a summary of all and of each group, whose name their jobs' names begin with."""
    print(
        f"{'case':{width}}  measured  spread  predicted  simulated  bytes  largest deviation of a predicted term"
    )
    for each in found:
        print(
            f"{each.key:{width}} {each.measured_s:7.3f} s {each.spread:7.1%} {each.predicted:+10.1%} "
            f"{each.simulated:+10.1%}  {'exact' if each.bytes_agree else 'DIFFER'}  {each.worst_term}"
        )
    for name in ("all", *groups):
        chosen = [each for each in found if name == "all" or each.key.startswith(name + " ")]
        if chosen:
            print(f"{name:24} {len(chosen):3}: {_errors(chosen)}")
    known = rows_of(file)
    loads = [row["load"] for rows in known.values() for row in rows]
    print(
        f"load while measuring: median {statistics.median(loads):.1f}, {min(loads):.1f} to {max(loads):.1f}"
    )
    print(f"bytes exact: {sum(each.bytes_agree for each in found)} of {len(found)}")
    _coverage([each.is_inside for each in found if each.is_inside is not None])


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Kendall's rank correlation of two lists without ties: 1 if they have the same order."""
    pairs = [(i, j) for j in range(len(a)) for i in range(j)]
    return sum(1 if (a[i] < a[j]) == (b[i] < b[j]) else -1 for i, j in pairs) / len(pairs)


def _errors(found: Sequence[Result]) -> str:
    words = [f"spread {statistics.median(each.spread for each in found):.1%}"]
    for name in ("predicted", "simulated"):
        errors = [abs(getattr(each, name)) for each in found]
        words.append(f"{name} |error| median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return "; ".join(words)


def _coverage(inside: list[bool]) -> None:
    """Print how many measurements the 90 % intervals contain, and how likely so few or fewer are."""
    if not inside:
        return
    n, k = len(inside), sum(inside)
    fewer = sum(comb(n, i) * 0.9**i * 0.1 ** (n - i) for i in range(k + 1))
    print(f"90 % interval: {k} of {n} inside; probability of so few: {fewer:.3f}")
