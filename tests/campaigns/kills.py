"""200 times kill -9 at a random moment: a driver, server, agent, rank or forkserver, of every kind of run.

    PYTHONPATH=tests python tests/campaigns/kills.py --first 0 --count 50

Each case starts a driver of its own with a folder for temporary files of its own, and kills one process of it once the
run has got to where the case asks for it. Afterwards everything must have ended within a minute, the driver without a
raw error, the run must read, and neither a process, a semaphore nor a temporary socket folder may be left. A case
whose run was over before the kill says so ("missed") and is tried again, and is not counted as passed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from _campaign import Outcome, run

import shardscope as ss
from conformance.processes import marked
from conformance.runs import semaphores

CASES = 200
TRIES = 3
WITHIN_S = 60.0
MARK = "SHARDSCOPE_KILLS"
VICTIMS = ("driver", "server", "agent", "rank", "forkserver")
KINDS = {
    "ring": {"strategy": "ring"},
    "server": {"strategy": "parameter-server:async"},
    "zero-3": {"strategy": "zero-3"},
    "pipeline": {"strategy": "pipeline", "model": "gpt-nano", "data": "python-source", "batch": 8},
    "gossip": {"strategy": "gossip"},
    "check": {"strategy": "ring"},
    "tune": {"strategy": "ring", "steps": 500},  # a trial that was killed is trained again, to its end
}
DRIVER = """
import json, sys
import shardscope as ss
kind, fields = sys.argv[1], json.loads(sys.argv[2])
job = ss.Job(**{"model": "mlp", "data": "digits", "world_size": 2, "steps": 1000000, **fields})
try:
    if kind == "check":
        ss.check(job, 1000000)
    elif kind == "tune":
        ss.tune(job, {"optimizer.lr": (1e-4, 1e-2)}, objectives=["loss"], trials=1, baselines=False, name="kills")
    else:
        ss.launch(job).wait()
except ss.ShardscopeError as error:
    print(str(error).splitlines()[0])
"""


def left_after_a_while(mark: str) -> list[psutil.Process]:
    """The processes of one case that have not ended in time."""
    deadline = time.monotonic() + WITHIN_S
    while left := [*marked(MARK, mark)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def case(number: int, source: random.Random) -> Outcome:
    """One kill; tried again with a shorter delay where it came too late."""
    victim, kind = VICTIMS[number % len(VICTIMS)], source.choice(sorted(KINDS))
    steps, delay_s, rank = source.choice([0, 0, 1, 5, 50]), source.uniform(0.0, 0.3), source.randrange(2)
    outcome = Outcome("missed", violation=True)
    for _ in range(TRIES):
        outcome = _kill(victim, kind, steps=steps, delay_s=delay_s, rank=rank)
        if outcome.name != "missed":
            break
    details = {"victim": victim, "kind": kind, "steps": steps, **outcome.details}
    return Outcome(f"{victim}: {outcome.name}", outcome.violation, details)


def _kill(victim: str, kind: str, *, steps: int, delay_s: float, rank: int) -> Outcome:
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "tmp").mkdir()
        env = {**os.environ, MARK: mark, "SHARDSCOPE_RUNS": str(place / "runs"), "TMPDIR": str(place / "tmp")}
        with (place / "err").open("wb") as err:
            driver = subprocess.Popen(
                [sys.executable, "-c", DRIVER, kind, json.dumps(KINDS[kind])], stdout=subprocess.PIPE, stderr=err,
                env=env, cwd=folder, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            found = _wait_for(driver, place / "runs", steps)
            if found is None:
                return Outcome("missed", True, {"error": (place / "err").read_text()[-2000:]})
            time.sleep(delay_s)
            return _after(found, driver, victim, rank, mark, place)
        finally:
            for process in marked(MARK, mark):
                process.kill()
            driver.kill()
            driver.communicate()


def _wait_for(driver: subprocess.Popen[str], root: Path, steps: int) -> ss.Run | None:
    """The run of a driver once it has an agent and all its ranks have got so far; None if it ended before."""
    deadline = time.monotonic() + WITHIN_S
    while driver.poll() is None and time.monotonic() < deadline:
        for path in root.rglob("job.json"):
            seen = ss.Run.attach(path.parent)
            counts = [len(seen.events("step", rank)) for rank in range(2)]
            if seen.state == "running" and len(seen.events("process")) == 2 and min(counts) >= steps:
                return seen
        time.sleep(0.02)
    return None


def _after(
    seen: ss.Run, driver: subprocess.Popen[str], victim: str, rank: int, mark: str, place: Path
) -> Outcome:
    """Kill, wait, and look at what is left."""
    agent = seen._dir.read_status()
    assert agent is not None
    held = semaphores(agent.pid)
    target = _target(seen, driver, victim, rank, agent.pid)
    if not seen.is_alive or target is None:
        return Outcome("missed", violation=True)
    target.kill()
    began = time.monotonic()
    left = left_after_a_while(mark)
    faults = [f"processes are left: {left}"] if left else []
    took_s = round(time.monotonic() - began, 2)
    faults += _faults(seen.path, driver, victim, place)
    faults += [f"{path} is left" for path in held if path.exists()]
    return Outcome("; ".join(faults) or "ok", bool(faults), {"took_s": took_s, **_told(seen.path)})


def _target(
    seen: ss.Run, driver: subprocess.Popen[str], victim: str, rank: int, agent: int
) -> psutil.Process | None:
    try:
        ranks = {event["rank"]: event["pid"] for event in seen.events("process")}
        pids = {"driver": driver.pid, "agent": agent, "rank": ranks[rank]}
        parents = {"server": agent, "forkserver": ranks[rank]}
        return psutil.Process(parents[victim]).parent() if victim in parents else psutil.Process(pids[victim])
    except psutil.NoSuchProcess:
        return None


def _faults(path: Path, driver: subprocess.Popen[str], victim: str, place: Path) -> list[str]:
    code, said = driver.wait(WITHIN_S), (place / "err").read_text()
    faults = [f"left in the temporary folder: {left.name}" for left in (place / "tmp").glob("pymp-*")]
    if victim != "driver" and (code != 0 or "Traceback" in said):
        faults.append(f"the driver ended with {code}: {said[-2000:]}")
    again = ss.Run.attach(path)
    if again.is_alive:
        faults.append(f"the run is {again.state}")
    again.metrics(), again.summary(), again.timeline()
    return faults


def _told(path: Path) -> dict[str, Any]:
    again = ss.Run.attach(path)
    error = str(again.error).splitlines()[0] if again.error else None
    return {"state": again.state, "told": error or again.reason}


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
