"""Files of the toolkit that one call enters, counted while it runs: what a reader opens to follow it from end to end.

Each call is made once before it is counted, so files that only fill a cache are left out. Run it as ``python
tests/benchmarks/files_entered.py [--files]``; ``--files`` names the files. The goals are those of the design.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import shardscope as ss

TOOLKIT = Path(ss.__file__).parent
JOB = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=2, steps=5, batch=8)
CLUSTER = ss.Cluster.of("a100-80gb", per_node=2)
LAYOUT = ss.Layout(data=2, zero=1, global_batch=8)


def entered(call: Callable[[], object]) -> list[str]:
    """Return the files whose functions run during a call, in all threads."""
    seen = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = (Path(name) for name in seen if name.endswith(".py"))
    return sorted(str(path.relative_to(TOOLKIT)) for path in paths if path.is_relative_to(TOOLKIT))


def main(*options: str) -> None:
    """Print the number of files of each call, and its goal."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run = ss.launch(JOB).wait()
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "str(predict(job))": (lambda: str(ss.predict(JOB)), 28),
            "str(predict(model, cluster, layout))": (lambda: str(ss.predict("gpt2", CLUSTER, LAYOUT)), 28),
            "str(predict(job, cluster))": (lambda: str(ss.predict(JOB, CLUSTER)), 40),
            "simulate(job, cluster)": (lambda: ss.simulate(JOB, CLUSTER), 50),
            "tune(job, trials=1), again": (lambda: ss.tune(JOB, trials=1), 45),
            "str(compare(run))": (lambda: str(ss.compare(run)), 60),
        }
        for name, (call, goal) in calls.items():
            call()
            files = entered(call)
            print(f"{name:<38}{len(files):4} files  (goal {goal})")
            if "--files" in options:
                print(*files, sep="\n    ", end="\n\n")
        os.chdir(TOOLKIT)


if __name__ == "__main__":
    main(*sys.argv[1:])
