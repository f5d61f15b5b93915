"""Studies whose driver is killed at any of its writes, and what must hold of a study whatever has happened to it.

The drivers are forked from one warm process, which this module is when it is run. Their trials' runs are copies of one
that was run before, so that hundreds of drivers can be killed in the time of a few runs: what is tried is the storage.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import shardscope as ss
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.tuning.records import TrialRecord
from shardscope.tuning.session import StudySession

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6, eval_every=6)
LONG = JOB.replace(steps=100_000, eval_every=100_000)
SPACE: dict[str, Any] = {"optimizer": ["adamw", "nesterov"], "optimizer.lr": (1e-3, 1e-1, "log")}
TRIALS = 2
LANES = 4


def instant(recorded: Path) -> Callable[..., Run]:
    """A `launch` whose runs end at once, with the figures of a recorded one; till then they are this process's."""

    def launch(job: ss.Job, *, root: Path, gated: bool = False, preflight: bool = True) -> Run:
        run = RunDir.create(job, root, gated=gated)
        me = {"pid": os.getpid(), "process_started": process_started()}
        run.write_status("running", **me)

        def end() -> None:
            for file in recorded.glob("rank-*.jsonl"):
                shutil.copy(file, run.path)
            run.write_status("completed", **me)

        threading.Timer(0.01, end).start()
        return Run(run)

    return launch


def faults_of(records: list[TrialRecord], trials: int) -> list[str]:
    """What of a study is lost, doubled, changed, or unfinished; nothing, whoever was killed."""
    heirs_of = {r.number: [heir for heir in records if heir.retry_of == r.number] for r in records}
    faults = [f"trial {r.number} is still running" for r in records if r.state == "running"]
    faults += [
        f"trial {number} was to be run again as {heirs[0].number}, which still waits"
        for number, heirs in heirs_of.items()
        if heirs and heirs[0].state == "waiting"
    ]
    counted = [r for r in records if r.counted and r.state != "waiting"]
    if len(counted) != trials:
        faults.append(f"{len(counted)} of {trials} trials count")
    faults += [f"trial {r.number} is {r.state}: {r.reason}" for r in counted if r.state != "complete"]
    runs = [r.run for r in counted]
    if len(set(runs)) < len(runs):
        faults.append("a run counts twice")
    for record in records:
        heirs = heirs_of[record.number]
        if record.counted and heirs:
            faults.append(f"trial {record.number} counts, and was run again")
        if heirs and any(heirs[0].params.get(name) != value for name, value in record.params.items()):
            faults.append(f"trial {record.number} was run again with other settings")
    return faults + list(_other_than_run(counted))


def _other_than_run(counted: list[TrialRecord]) -> Iterator[str]:
    for record in counted:
        job = Run.attach(record.run or "").job
        if (job.optimizer.name, job.optimizer.lr) != (
            record.params["optimizer"],
            record.params["optimizer.lr"],
        ):
            yield f"trial {record.number} was run with other settings than it says"


def kill_at(write: int) -> None:
    """Have this process killed in the middle of this write to its journal, half of which is then on disk."""
    from optuna.storages.journal import JournalFileBackend

    done = 0
    whole = JournalFileBackend.append_logs

    def append(self: Any, logs: list[dict[str, Any]]) -> None:
        nonlocal done
        done += 1
        if done == write:
            text = json.dumps(logs[0])
            with open(self._file_path, "a") as file:
                file.write(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, logs)

    JournalFileBackend.append_logs = append


def drive(root: Path, recorded: Path, write: int | None) -> None:
    """Go on with the study to its end, or to a write."""
    from shardscope.tuning import driver, storage

    driver.launch = instant(recorded)
    storage.STATED_WITHIN_S = 0.05
    storage._RETRY_S = driver._READ_EVERY_S = 0.01
    os.fsync = lambda file: None  # a killed process takes nothing back that it has written
    if write is not None:
        kill_at(write)
    session = StudySession.open(JOB, SPACE, trials=TRIALS, name="killed", root=root, sampler="random")
    session.driver.feasibility = None  # would import torch, in each of them
    deadline = time.monotonic() + 120.0
    while session.driver.tick():
        time.sleep(0.001)
        if time.monotonic() > deadline:
            raise TimeoutError(f"trials left: {[(r.number, r.state) for r in session.records()]}")


def begin(work: Callable[[], None]) -> int:
    """Do it in a process of its own, whose pid this is."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    """How it ended, once it has."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


DRIVER = """
    import signal, sys, time
    import shardscope as ss
    from conformance.studies import JOB, LONG, SPACE
    signal.signal(signal.SIGINT, signal.default_int_handler)
    storage = sys.argv[2] if len(sys.argv) > 2 else None

    def say(session):
        for number, live in session.driver.live.items():
            if live.measured.steps > 2 and number not in said:
                said.add(number)
                print(number, live.run.path, flush=True)

    for _ in range(3):
        said = set()
        try:
            ss.tune(LONG, SPACE, trials=2, name=sys.argv[1], storage=storage, baselines=False, on_tick=say)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def start_driver(name: str, url: str | None = None) -> subprocess.Popen[str]:
    """A process that runs a study whose trials do not end, as a notebook's kernel would."""
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), name, *([url] if url else [])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def said(driver: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


def running(driver: subprocess.Popen[str]) -> tuple[int, ss.Run]:
    """The next trial that has taken steps: its number and its run."""
    number, path = said(driver).split(" ", 1)
    return int(number), ss.Run.attach(path)


def lane(write: int, folder: Path, recorded: Path) -> None:
    """Kill a driver at every so many of its writes, its successor at one of its own, and let a third finish."""
    while True:
        root = folder / f"{write:03d}"
        ends = [ended(begin(partial(drive, root, recorded, kill))) for kill in (write, 1 + write % 7, None)]
        line = json.dumps({"write": write, "root": str(root), "ends": ends})
        os.write(1, f"{line}\n".encode())  # in one piece: other lanes write to the same pipe
        if ends[0] == 0:
            return
        write += LANES


def main() -> None:
    """Between them, lanes kill a driver at each of its writes; side by side, for they mostly wait."""
    folder, recorded = Path(sys.argv[1]), Path(sys.argv[2])
    lanes = [begin(partial(lane, first, folder, recorded)) for first in range(1, 1 + LANES)]
    codes = [ended(pid) for pid in lanes]
    sys.exit(any(codes))  # what a signal ended has a code below 0


if __name__ == "__main__":
    main()
