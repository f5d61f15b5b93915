"""A kernel that launches runs over shared memory, of which one process is killed, and a look at what is left.

A case is drawn from a random generator: who is killed, in which phase of the run and at which call within it, with
which strategy and how many ranks. Afterwards nothing may be left but what serves the next run, and everyone who is
told of the end must be told the right name.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import shardscope as ss
from conformance.kill_points import POINTS, VICTIMS, Plan
from conformance.processes import marked

WITHIN_S = 60.0
TRACKER = "resource_tracker"
MARK = "SHARDSCOPE_KILLED_KERNEL"
STRATEGIES = (
    "ring", "all-reduce", "tree", "hierarchical:2", "zero-1", "zero-2", "zero-3", "gossip", "parameter-server",
    "parameter-server:async", "pipeline",
)  # fmt: skip
PLAN = {"1": "columns", "3": "rows", "5": "columns", "7": "rows"}
HYBRID: dict[str, Any] = {
    f"{data}+tensor2": {"name": "mesh", "data": data, "tensor": 2, "tensor_plan": PLAN}
    for data in ("ring", "tree", "all-reduce", "zero-1", "zero-2", "zero-3")
}
"""Layouts of several axes, on 4 ranks."""
WITH = {
    "collective": ("all-reduce", "gossip"),
    "message": tuple({*STRATEGIES} - {"all-reduce"}),
    "shards": ("zero-2", "zero-3"),
}
"""The strategies that call the transport's collectives, send messages, or share shards, at every step; all of them do
the rest."""
KERNEL = """
import json, sys
import shardscope as ss
from conformance.kill_points import Plan, model_of
ss.launch(ss.Job(model="mlp", data="digits", strategy="single", world_size=1, steps=1)).wait()
print("ready", flush=True)
for line in sys.stdin:
    plan, width, fields = json.loads(line)
    run = ss.launch(ss.Job(model=model_of(Plan(*plan), width), data="digits", transport="shm", **fields))
    print(run.path, flush=True)
    try:
        run.wait()
    except ss.RunFailed:
        pass
    print("over", flush=True)
"""


class Case(NamedTuple):
    """One kill; see `Plan`. `delay_s` is the time until it, from the launch, where the point is ``"any"``."""

    plan: Plan
    strategy: str
    world_size: int
    width: int
    delay_s: float

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the job."""
        steps = 3 if self.plan.point == "shutdown" else 1_000_000
        return {
            "strategy": HYBRID.get(self.strategy, self.strategy),
            "world_size": self.world_size,
            "steps": steps,
            "batch": 48,
        }


def draw(
    source: random.Random, victim: str | None = None, point: str | None = None, *, is_hybrid: bool = False
) -> Case:
    """A random case, of a given victim and phase or any, under a single strategy or a layout of several axes."""
    victim, point = victim or source.choice(VICTIMS), point or source.choice([*POINTS, "any"])
    able = sorted(HYBRID if is_hybrid else WITH.get(point, STRATEGIES))
    strategy = source.choice([name for name in able if point != "shards" or name.startswith(WITH[point])])
    has_four = is_hybrid or strategy.startswith("hierarchical")
    world_size = 4 if has_four else source.choice([2, 3, 4])
    call = source.randint(1, POINTS.get(point, 1))
    plan = Plan(
        point, call, source.random() < 0.5, victim, source.randrange(world_size), "", source.random() < 0.75
    )
    return Case(plan, strategy, world_size, source.choice([16, 256, 1024]), source.uniform(0.0, 1.0))


class Ending(NamedTuple):
    """What was found after a kill: faults in words, whether the run was over before, and details."""

    faults: list[str]
    was_missed: bool = False
    details: dict[str, Any] = {}  # noqa: RUF012 - never written to


class Kernel:
    """A process that launches one run after another, with a folder for temporary files of its own.

    `owns_shm` says that nobody else uses `/dev/shm`, so that everything there counts as left behind.
    """

    def __init__(self, *, owns_shm: bool = False) -> None:
        self._in_shm = "*" if owns_shm else "*shardscope*"
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")
        self._place = Path(self._folder.name)
        self._temporary = self._place / "tmp"
        self._temporary.mkdir()
        self._errors = (self._place / "err").open("w+")
        tests, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
        env = {
            **os.environ, MARK: self._mark, "SHARDSCOPE_RUNS": str(self._place / "runs"),
            "TMPDIR": str(self._temporary), "TORCHINDUCTOR_CACHE_DIR": str(self._place / "torch"),
            "PYTHONPATH": os.pathsep.join([tests, *path.split(os.pathsep)]),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=env, cwd=self._place, text=True, start_new_session=True,
        )  # fmt: skip
        self._require("ready")

    @property
    def is_alive(self) -> bool:
        """Whether it can launch another run."""
        return self._process.poll() is None

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _require(self, word: str) -> None:
        line = self._line()
        assert line == word, f"{line}\n{(self._place / 'err').read_text()[-3000:]}"

    def living(self) -> Iterator[psutil.Process]:
        """Processes of this kernel: itself, its server, and those of its runs."""
        return marked(MARK, self._mark)

    def close(self) -> None:
        """End it and all that it has started, except resource trackers, which end when they have cleaned up."""
        self._process.kill()
        self._process.communicate()
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                if TRACKER not in " ".join(process.cmdline()):
                    process.kill()
        self._errors.close()
        self._folder.cleanup()

    def kill(self, case: Case) -> Ending:
        """Launch the case's run, kill its victim, and say what is wrong afterwards."""
        note = self._place / f"note-{uuid.uuid4().hex}"
        assert self._process.stdin is not None
        request = [case.plan._replace(note=str(note)), case.width, case.fields]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (path := self._line()):
            return Ending([f"no run: {(self._place / 'err').read_text()[-2000:]}"])
        run = ss.Run.attach(path)
        if case.plan.point == "any":
            time.sleep(case.delay_s)
            self._kill_from_outside(run, case.plan, note)
        if not self._wait_for_note(note, run):
            return self._after_a_miss(run)
        killed_at, pid = json.loads(note.read_text())
        return self._after(case, run, killed_at, pid)

    def _kill_from_outside(self, run: ss.Run, plan: Plan, note: Path) -> None:
        deadline = time.monotonic() + WITHIN_S
        while (victim := self._find(run, plan)) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        note.write_text(json.dumps([time.time(), victim.pid]))
        victim.kill()

    def _find(self, run: ss.Run, plan: Plan) -> psutil.Process | None:
        kernel = psutil.Process(self._process.pid)
        if plan.victim == "kernel":
            return kernel
        server = next(
            (each for each in kernel.children() if "launcher.server" in " ".join(each.cmdline())), None
        )
        if plan.victim == "server" or server is None:
            return server
        if plan.victim == "agent":
            status = run._dir.read_status()
            is_own = status is not None and status.pid not in (server.pid, kernel.pid)
            return psutil.Process(status.pid) if status is not None and is_own else None
        pids = {event["rank"]: event["pid"] for event in run.events("process")}
        return psutil.Process(pids[plan.rank]) if plan.rank in pids else None

    def _wait_for_note(self, note: Path, run: ss.Run) -> bool:
        deadline = time.monotonic() + WITHIN_S
        while not (note.exists() and note.read_text()):
            if time.monotonic() > deadline or not run.is_alive:
                return note.exists()
            time.sleep(0.005)
        return True

    def _after_a_miss(self, run: ss.Run) -> Ending:
        """The run was over before the kill, or has not come to the call in time."""
        run.stop(grace_s=0.0)
        self._require("over")
        return Ending([], was_missed=True)

    def _after(self, case: Case, run: ss.Run, killed_at: float, pid: int) -> Ending:
        victim, faults = case.plan.victim, []
        told_s = None
        if victim != "kernel":
            self._require("over")
            told_s = round(time.time() - killed_at, 3)
        else:
            self._process.wait(WITHIN_S)
        if left := self._left(victim):
            faults.append(f"processes are left: {left}")
        ended_s = round(time.time() - killed_at, 3)
        again = ss.Run.attach(run.path)
        told = str(again.error) if again.error else f"{again.state}: {again.reason}"
        faults += [f"{again.path.name} is {again.state}"] if again.is_alive else []
        faults += _wrong_name(case, again, told)
        faults += [f"a file is left: {path}" for path in self._files()]
        again.metrics(), again.summary()
        details = {"told": told, "told_s": told_s, "ended_s": ended_s, "pid": pid}
        return Ending(faults, details=details)

    def _left(self, victim: str) -> list[str]:
        """Processes that should have ended; the kernel and its server go on if they were not killed."""
        stays = [] if victim == "kernel" else [KERNEL] if victim == "server" else [KERNEL, "launcher.server"]
        deadline = time.monotonic() + WITHIN_S
        while True:
            left = []
            for process in self.living():
                try:
                    command = " ".join(process.cmdline())
                    is_fork = process.ppid() != self._process.pid and process.pid != self._process.pid
                except psutil.Error:
                    continue
                if TRACKER in command or (not is_fork and any(word in command for word in stays)):
                    continue
                left.append(f"{process.pid} {command[-200:]}")
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.01)

    def _files(self) -> list[str]:
        """Files that are left; a semaphore goes when its resource tracker has seen the end of those who used it."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            left = [*self._temporary.iterdir(), *Path("/dev/shm").glob(self._in_shm)]
            if not left or time.monotonic() > deadline:
                return [str(path) for path in left]
            time.sleep(0.01)


def _wrong_name(case: Case, run: ss.Run, told: str) -> list[str]:
    """What is wrong with the words that the run ended with, and with those of its ranks."""
    plan = case.plan
    expected = {
        "rank": rf"^rank {plan.rank}( \(.*\))? of strategy .* was killed by SIGKILL",
        "agent": "^the agent of run .* was killed",
        "server": r"^the launch server .* was killed|could not be started: the launch server \(process \d+\) ended$",
        "kernel": "^stopped: the program that launched it ended",
    }[plan.victim]
    is_over = len(run.events("end")) == case.world_size
    faults = []
    if not re.search(expected, told) and not (is_over and plan.victim != "rank" and run.state == "completed"):
        faults.append(f"the run says {told!r}")
    named = {
        int(rank)
        for event in run.events("error")
        for rank in re.findall(r"the process of rank (\d+) has ended", event["message"])
    }
    if plan.victim == "rank" and named - {plan.rank}:
        faults.append(f"ranks say that {sorted(named)} have ended")
    return faults
