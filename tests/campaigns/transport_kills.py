"""200 kills while ranks communicate through shared memory: a rank, an agent, a launch server, or the kernel.

    PYTHONPATH=tests python tests/campaigns/transport_kills.py --first 0 --count 50

The victim is killed at a random call: while the memory is set up, within a collective or a message, while a rank leaves
its group; or at any time after the launch. Afterwards no process, file or entry in /dev/shm may be left, the run
must name who was killed, and within five seconds everyone must have ended and the kernel been told.

Where it may, the campaign moves into a mount namespace of its own, whose /dev/shm has 64 MB as in a container, so that
everything there counts.
"""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import sys

from _campaign import Outcome, run

from conformance.kills import Kernel, draw

CASES = 200
TRIES = 3
WITHIN_S = 5.0
OWN_SHM = "SHARDSCOPE_OWN_SHM"
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "-m"]
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
_kernels: list[Kernel] = []


def case(number: int, source: random.Random, *, is_hybrid: bool = False) -> Outcome:
    """One kill; drawn again where the run was over before."""
    for _ in range(TRIES):
        drawn = draw(source, is_hybrid=is_hybrid)
        ending = _kernel().kill(drawn)
        if not ending.was_missed:
            break
    plan = drawn.plan
    what = f"{plan.victim}, {plan.point}"
    details = {**plan._asdict(), "strategy": drawn.strategy, "world_size": drawn.world_size, **ending.details}
    if ending.was_missed:
        return Outcome(f"{what}: missed", violation=True, details=details)
    times = [ending.details.get(key) or 0.0 for key in ("told_s", "ended_s")]
    faults = [*ending.faults, *(["it took too long"] if max(times) > WITHIN_S else [])]
    return Outcome(f"{what}: {'; '.join(faults) or 'ok'}", bool(faults), details)


def _kernel() -> Kernel:
    """The kernel of the case before, or another one if that was killed."""
    if not _kernels or not _kernels[-1].is_alive:
        for kernel in _kernels:
            kernel.close()
        _kernels[:] = [Kernel(owns_shm=OWN_SHM in os.environ)]
    return _kernels[-1]


@atexit.register
def _close() -> None:
    for kernel in _kernels:
        kernel.close()


def _move() -> None:
    """Start again with a `/dev/shm` of our own."""
    if (
        OWN_SHM not in os.environ
        and subprocess.run([*UNSHARE, "sh", "-c", MOUNT, "sh", "true"], check=False).returncode == 0
    ):
        os.environ[OWN_SHM] = "1"
        os.execvp(UNSHARE[0], [*UNSHARE, "sh", "-c", MOUNT, "sh", sys.executable, *sys.argv])


if __name__ == "__main__":
    _move()
    run(case, cases=CASES, description=__doc__)
