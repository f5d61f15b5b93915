"""Twenty sizes of a disk that fills while a run saves checkpoints, and ten limits on the size of a file.

Asserts that the run fails with one sentence that names the disk (or the limit) and what was being written, that no
agent is called killed, that what carries a checkpoint's name is whole, and that no process is left. A disk is a tmpfs
of the case's own, which needs user namespaces (unshare -Urm).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from _campaign import Outcome, run

SIZES, LIMITS = 20, 10
STRATEGIES = ("ring", "zero-3", "parameter-server", "gossip", "single")
TRAIN = """
    import json, os, resource, sys
    from pathlib import Path
    import shardscope as ss
    from shardscope.training.checkpoint import complete_checkpoints
    from shardscope.training.checkpoint.index import read_index, verify

    root, strategy, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=1 if strategy == "single" else 2,
                 steps=400, checkpoint=ss.Checkpoint(every=3, keep=999))
    told = {"error": None, "whole": 0, "damaged": []}
    try:
        run = ss.launch(job, root=root)
    except ss.errors.LaunchError as error:
        print(json.dumps({**told, "state": "refused", "error": str(error)}))
        sys.exit()
    try:
        run.wait(100)
    except ss.RunFailed as error:
        told["error"] = str(error)
    for path in complete_checkpoints(run.path / "checkpoints"):
        try:
            verify(path, index := read_index(path), index.files)
            told["whole"] += 1
        except Exception as error:
            told["damaged"].append(f"{path.name}: {error}")
    ss.runtime.shut_down()
    print(json.dumps({**told, "state": run.state, "log": run.logs()[-2000:]}))
"""


def case(number: int, source: random.Random) -> Outcome:
    """A run on a disk, or under a limit, of a random size."""
    folder, strategy = Path(tempfile.mkdtemp(prefix="shardscope-disk-")), source.choice(STRATEGIES)
    on_disk = number < SIZES
    size = int(2 ** source.uniform(17.5, 23)) if on_disk else int(2 ** source.uniform(16.5, 20))
    limit = 0 if on_disk else size
    mount = f"mount -t tmpfs -o size={size} none {folder} && " if on_disk else ""
    command = f'{mount}exec {sys.executable} -c "$CODE" {folder}/runs {strategy} {limit}'
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "bash", "-c", command], capture_output=True, text=True, timeout=180, check=False,
            env={**os.environ, "CODE": textwrap.dedent(TRAIN)},
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    details = {"size": size, "strategy": strategy, "stderr": done.stderr[-2000:]}
    lines = done.stdout.strip().splitlines()
    if not lines:
        return Outcome("no answer", violation=True, details=details)
    told = json.loads(lines[-1])
    return Outcome(*_verdict(told, on_disk=on_disk), details={**details, **told})


def _verdict(told: dict[str, object], *, on_disk: bool) -> tuple[str, bool]:
    """What became of the run, and whether that is wrong."""
    error = str(told["error"] or "").splitlines()[0] if told["error"] else ""
    reason = "No space left on device" if on_disk else "File too large"
    if told["damaged"]:
        return "a damaged checkpoint has a name", True
    if told["state"] == "completed":
        return "all fitted", False
    if reason not in error:
        return f"another error: {error[:120]}", True
    if "traceback" in str(told["error"]).lower():
        return "a traceback beside the sentence", True
    what = "a checkpoint" if "while writing checkpoint" in error else "the run directory or its events"
    return f"{told['state']}: {reason} for {what}", False


if __name__ == "__main__":
    run(case, cases=SIZES + LIMITS, description=__doc__)
