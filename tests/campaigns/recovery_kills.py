"""900 kills of runs that recover: 100 for each of four strategies on two kinds of links, and 100 within a checkpoint.

    PYTHONPATH=tests python tests/campaigns/recovery_kills.py --first 0 --count 50

A rank, a node, the agent or the forkserver is killed before a random step or at a random time. Asserts that every job
ends with the losses of the undisturbed run, that at most as many steps are repeated as lie between two checkpoints,
that no recovery takes longer than 15 s, and that no process is left. A run whose own agent is killed ends; it is
launched again with `resume`, or from the start if it had saved nothing.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import tempfile
import time
import uuid
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
from _campaign import Outcome, run

import shardscope as ss
from conformance.processes import marked
from shardscope.runtime.emulated import why_not_emulated
from shardscope.spec.cluster import EmulatedCluster
from shardscope.training.checkpoint import complete_checkpoints
from shardscope.training.checkpoint.index import read_index, verify

STRATEGIES = ("ring", "zero-3", "pipeline", "parameter-server")
PLACES = ("shm", "emulated")
KILLS = 100
CASES = KILLS * (len(STRATEGIES) * len(PLACES) + 1)
STEPS, EVERY, RANKS = 24, 5, 4
CLUSTER = ss.Cluster.emulated(nodes=2, per_node=2, bandwidth="1 Gbit/s")
MARK = "SHARDSCOPE_CAMPAIGN_CASE"
WITHIN_S = 180.0
RECOVERED_S = 15.0
"""Longest time that a recovery may take, from the failure to the first step, in seconds."""


class Setup(NamedTuple):
    """Where and how a case trains."""

    strategy: str
    place: str

    @property
    def job(self) -> ss.Job:
        """The job, without recovery."""
        return ss.Job(
            model="mlp", data="digits", strategy=self.strategy, world_size=RANKS, steps=STEPS, batch=48,
            checkpoint=ss.Checkpoint(every=EVERY), transport="shm" if self.place == "shm" else "tcp",
        )  # fmt: skip

    @property
    def cluster(self) -> EmulatedCluster | None:
        """The cluster; None for this machine."""
        return CLUSTER if self.place == "emulated" else None


def case(number: int, source: random.Random) -> Outcome:
    """One kill, and the run that goes on."""
    in_checkpoint = number >= KILLS * len(STRATEGIES) * len(PLACES)
    setup = Setup(STRATEGIES[number % 4], PLACES[number // 4 % 2])
    if setup.place == "emulated" and why_not_emulated():
        return Outcome("skipped: clusters cannot be emulated here")
    victim = "checkpoint" if in_checkpoint else source.choice(_victims(setup.place))
    _losses_undisturbed(
        setup
    )  # also starts the launch server, which outlives the case and must not have its mark
    os.environ[MARK] = uuid.uuid4().hex
    root = Path(tempfile.mkdtemp(prefix="shardscope-recovery-"))
    try:
        return _killed(setup, victim, source, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _victims(place: str) -> tuple[str, ...]:
    either = ("rank at a step", "rank at a time", "two ranks", "agent")
    return (*either, "node") if place == "emulated" else (*either, "forkserver")


def _killed(setup: Setup, victim: str, source: random.Random, root: Path) -> Outcome:
    expected = _losses_undisturbed(setup)
    faults = _faults(victim, source)
    started = time.monotonic()
    running = ss.launch(
        setup.job.replace(recovery=3), setup.cluster, root=root, faults=faults, preflight=False
    )
    resumed: ss.Run | None = None
    if victim in ("agent", "forkserver"):
        _kill_from_outside(running, victim, source)
    try:
        running.wait(WITHIN_S)
    except ss.RunFailed:
        if victim != "agent":
            raise
        saved = complete_checkpoints(running.path / "checkpoints")
        resumed = ss.launch(
            setup.job, setup.cluster, root=root, resume=running if saved else None, preflight=False
        ).wait(WITHIN_S)
    took_s, restarts = time.monotonic() - started, running.reduced().restarts
    summary = running.summary()
    details = {
        **setup._asdict(), "victim": victim, "faults": str(faults), "took_s": round(took_s, 2),
        "restarts": summary.restarts, "lost_steps": summary.lost_steps, "goodput": summary.goodput,
        "recovered_s": [restart.took_s for restart in restarts],
    }  # fmt: skip
    wrong = [
        *_wrong_losses(expected, running, resumed),
        *([f"{summary.lost_steps} steps repeated"] if summary.lost_steps > EVERY * summary.restarts else []),
        *_wrong_restarts(victim, summary.restarts, running),
        *(f"recovery took {each.took_s:.1f} s" for each in restarts if (each.took_s or 0.0) > RECOVERED_S),
        *_damaged(running),
        *_orphans(),
    ]
    return Outcome(f"{victim}: {'; '.join(wrong) or 'ok'}", bool(wrong), details)


@cache
def _losses_undisturbed(setup: Setup) -> dict[int, float]:
    with tempfile.TemporaryDirectory(prefix="shardscope-recovery-") as folder:
        return _losses(ss.launch(setup.job, setup.cluster, root=folder, preflight=False).wait(WITHIN_S))


def _losses(finished: ss.Run) -> dict[int, float]:
    return {step.number: step.loss for step in finished.reduced().steps}


def _faults(victim: str, source: random.Random) -> ss.Faults:
    step, rank = source.randint(1, STEPS), source.randrange(RANKS)
    if victim == "checkpoint":
        return ss.Faults().kill(rank, step=source.randint(1, STEPS - EVERY + 1), during="checkpoint")
    if victim == "rank at a step":
        return ss.Faults().kill(rank, step=step)
    if victim == "rank at a time":
        return ss.Faults().kill(rank, at=source.uniform(0.0, 0.2))
    if victim == "two ranks":
        return ss.Faults().kill(rank, step=step).kill(source.randrange(RANKS), step=source.randint(1, STEPS))
    return ss.Faults().kill(node=source.randrange(2), step=step) if victim == "node" else ss.Faults()


def _kill_from_outside(running: ss.Run, victim: str, source: random.Random) -> None:
    """Kill the agent or the forkserver of a run as soon as a random step has been taken."""
    wanted = source.randint(1, STEPS // 2)
    deadline = time.monotonic() + WITHIN_S
    while running.reduced().last_step < wanted and time.monotonic() < deadline:
        time.sleep(0.002)
    agent = psutil.Process(running._dir.read_status().pid)  # type: ignore[union-attr]
    if victim == "agent":
        agent.kill()
        return
    with_ranks = [child for child in agent.children() if len(child.children()) >= RANKS]
    if with_ranks:
        with_ranks[0].send_signal(signal.SIGKILL)


def _wrong_losses(expected: dict[int, float], running: ss.Run, resumed: ss.Run | None) -> list[str]:
    found = _losses(running) | ({} if resumed is None else _losses(resumed))
    if found.keys() != expected.keys():
        return [f"steps {sorted(expected.keys() ^ found.keys())} are missing or too many"]
    far = [step for step, loss in found.items() if not math.isclose(loss, expected[step], rel_tol=1e-6)]
    return [f"losses differ at steps {far}"] if far else []


def _wrong_restarts(victim: str, restarts: int, running: ss.Run) -> list[str]:
    """A kill by the plan must have been carried out once, and have led to one restart."""
    planned = len(running.faults)
    carried_out = len(running.reduced().faults)
    if victim in ("agent", "forkserver") or (victim == "rank at a time" and not carried_out):
        return []  # the run may be over before
    if carried_out != planned or not 1 <= restarts <= planned:
        return [f"{carried_out} of {planned} faults and {restarts} restarts"]
    return []


def _damaged(running: ss.Run) -> list[str]:
    """Read every checkpoint that looks complete."""
    left = complete_checkpoints(running.path / "checkpoints")
    for path in left:
        index = read_index(path)
        verify(path, index, index.files)
    was_saved = running.reduced().last_step > EVERY  # else the first one may have been under way
    return ["no checkpoint is left"] if was_saved and not left else []


def _orphans() -> list[str]:
    """Processes of this case that still exist ten seconds after its end."""
    mark, deadline = os.environ[MARK], time.monotonic() + 10
    while left := [*marked(MARK, mark)]:
        if time.monotonic() > deadline:
            return [f"orphans: {[process.pid for process in left]}"]
        time.sleep(0.05)
    return []


if __name__ == "__main__":
    run(case, cases=CASES, description=__doc__)
