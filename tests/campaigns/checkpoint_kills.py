"""A hundred kill -9 inside a checkpoint, of a rank, the agent or all: nothing that was saved is lost, and runs go on.

The process is killed as soon as a folder of a checkpoint that is being written appears, after a random fraction of what
one takes. Half of the runs write in the background, and half only what has changed. Asserts that the run says how it
ended, that its newest checkpoint is whole and no older than the last that was reported, that another run goes on from
it, and that no process is left.

    PYTHONPATH=tests python tests/campaigns/checkpoint_kills.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil
from _campaign import Outcome, run

import shardscope as ss
from conformance.runs import semaphores
from shardscope.training.checkpoint import complete_checkpoints
from shardscope.training.checkpoint.index import read_index, verify

KILLS = 100
STRATEGIES = ("ring", "zero-3", "parameter-server", "gossip", "pipeline")


def case(number: int, source: random.Random) -> Outcome:
    """Kill one run inside its k-th checkpoint and go on from what is left."""
    strategy, victim = (
        STRATEGIES[number % len(STRATEGIES)],
        source.choice(["rank 0", "rank 1", "agent", "all"]),
    )
    root = Path(tempfile.mkdtemp(prefix="shardscope-kills-"))
    job = ss.Job(
        model="mlp", data="digits", strategy=strategy, world_size=2, steps=100_000,
        checkpoint=ss.Checkpoint(
            every=2, keep=3, asynchronous=source.random() < 0.5, incremental=source.random() < 0.5
        ),
    )  # fmt: skip
    try:
        return _killed(job, root, victim, source)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _killed(
    job: ss.Job, root: Path, victim: str, source: random.Random, after: ss.Job | None = None
) -> Outcome:
    """Kill a run of `job` and go on from what is left, with `after` if it is given."""
    running = ss.launch(job, root=root)
    folder, wanted = running.path / "checkpoints", source.randrange(2, 6)
    deadline = time.monotonic() + 90
    while not (
        (found := list(folder.glob("*.partial"))) and len(running.events("checkpoint", rank=0)) >= wanted
    ):
        if time.monotonic() > deadline or not running.is_alive:
            running.stop()
            return Outcome("no checkpoint to kill in", violation=True, details={"victim": victim})
    time.sleep(source.uniform(0, 0.02))
    agent = psutil.Process(running._dir.read_status().pid)  # type: ignore[union-attr]
    family = [agent, *agent.children(recursive=True)]
    ranks = {event["rank"]: event["pid"] for event in running.events("start")}
    held = {path for process in family for path in semaphores(process.pid)} if victim == "all" else set()
    for pid in {"agent": [agent.pid], "all": [p.pid for p in family]}.get(victim) or [ranks[int(victim[-1])]]:
        with_pid = psutil.pid_exists(pid)
        if with_pid:
            os.kill(pid, signal.SIGKILL)
    told = _ended(running)
    _, alive = psutil.wait_procs(family, timeout=30)
    for path in held:  # their tracker, which would have removed them, was killed too
        path.unlink(missing_ok=True)
    reported = [event["step"] for event in running.events("checkpoint", rank=0)]
    details = {
        "victim": victim, "strategy": job.strategy.label, "partial": found[0].name, "told": told[:300],
        "checkpoint": job.checkpoint.model_dump(mode="json"),
    }  # fmt: skip
    left = complete_checkpoints(folder)
    if alive:
        return Outcome("orphans", violation=True, details=details)
    if not left or int(left[-1].name.removeprefix("step-")) < max(reported):
        return Outcome("a reported checkpoint is lost", violation=True, details=details)
    for path in left:
        index = read_index(path)
        verify(path, index, index.files)
    last = int(left[-1].name.removeprefix("step-"))
    again = (after or job).replace(steps=last + 2, checkpoint=ss.Checkpoint())
    rest = ss.launch(again, root=root, resume=running).wait(90)
    steps = [event["step"] for event in rest.events("step", rank=0)]
    inside = (folder / details["partial"]).exists()
    where = "inside a checkpoint" if inside else "just after one"
    return Outcome(f"resumed after a kill {where}", violation=steps != [last + 1, last + 2], details=details)


def _ended(running: ss.Run) -> str:
    try:
        running.wait(60)
    except ss.RunFailed as error:
        return str(error).splitlines()[0]
    return running.state


if __name__ == "__main__":
    run(case, cases=KILLS, description=__doc__)
