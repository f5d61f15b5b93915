"""How many files a reader has to follow: distinct product files entered by a prediction, a trial and a launch.

Run it as ``python tests/benchmarks/files.py``; to compare commits, run it with another checkout's ``toolkit`` first on
``PYTHONPATH``. Counted are files of the package in which a function is entered in this process once all is imported and
has been called before, so that what a module does while it is imported does not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardscope as ss

PACKAGE = Path(ss.__file__).parent


def entered(call: Callable[[], Any]) -> list[str]:
    """The product files that a call enters, in this process and its threads."""
    seen: set[str] = set()

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # takes it off
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in seen if Path(name).is_relative_to(PACKAGE))


def main() -> None:
    """Print the counts, and with ``--names`` the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="print the files too")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="shardscope-files-"))
    model, cluster = ss.Model.of("gpt3-175b"), ss.Cluster.of("a100-80gb", nodes=128, per_node=8)
    layout = ss.Layout(data=16, tensor=8, pipeline=8, global_batch=1536)
    job = ss.Job(model="mlp", data="digits", steps=3, optimizer="lamb", compression="topk", world_size=2)
    studies = iter(range(9))

    def trial() -> None:
        ss.tune(
            job, {"optimizer.lr": (1e-3, 1e-2, "log")}, trials=1, baselines=False, progress=False, root=root,
            name=f"files-{next(studies)}",
        )  # fmt: skip

    calls: dict[str, Callable[[], Any]] = {
        "predict": lambda: ss.predict(model, cluster, layout),
        "trial": trial,
        "launch": lambda: ss.launch(job.replace(seed=1), root=root).wait(60),
    }
    for name, call in calls.items():
        call()
        files = entered(call)
        print(f"{name:10}{len(files):4}")
        if options.names:
            print(*(f"    {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
