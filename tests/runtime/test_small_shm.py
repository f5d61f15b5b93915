"""With a small `/dev/shm` and no anonymous files, ranks share memory elsewhere, or use TCP and say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardscope.machine import namespaces_work
from shardscope.training.transports.shm.layout import SharedMemoryLayout

pytestmark = pytest.mark.slow

SCENES = {
    "64 MB as in Docker": {"shm": "64m", "tmp": "1m", "memfd": True},
    "1 MB": {"shm": "1m", "tmp": "1m", "memfd": True},
    "64 MB, no anonymous files": {"shm": "64m", "tmp": "1m", "memfd": False},
    "1 MB, no anonymous files": {"shm": "1m", "tmp": "64m", "memfd": False},
    "no space": {"shm": "1m", "tmp": "1m", "memfd": False},
}
SCRIPT = """
import json, os, subprocess, sys
import shardscope as ss
from conformance.kill_points import Plan, model_of

def mount(folder, size):
    subprocess.run(["umount", "-l", folder], stderr=subprocess.DEVNULL)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)

def job(memfd, **changes):
    model = model_of(Plan("none", 0, False, "rank", 0, "", memfd), 512)
    return ss.Job(model=model, data="digits", strategy="all-reduce", world_size=4, steps=5, batch=48, **changes)

found = {}
for name, scene in json.loads(sys.argv[1]).items():
    mount("/dev/shm", scene["shm"]), mount(os.environ["TMPDIR"], scene["tmp"])
    summary = ss.launch(job(scene["memfd"])).wait().summary()
    left = [*os.listdir("/dev/shm"), *os.listdir(os.environ["TMPDIR"])]
    found[name] = [summary.transport, summary.transport_reason, summary.loss, left]
try:
    ss.launch(job(False, transport="shm")).wait()
except ss.RunFailed as failed:
    found["asked for"] = str(failed)
print(json.dumps(found))
"""
ALL = "all ranks are CPU ranks of one host"
WHY = (
    "the ranks cannot open memory that they share (rank 0: [Errno 28] no file of {size} bytes without a name "
    "(memfd_create: Operation not permitted; /dev/shm: No space left on device; {tmp}: No space left on device))"
)


@pytest.mark.skipif(not namespaces_work(), reason="this system grants no namespaces of one's own")
def test_ranks_share_memory_wherever_there_is_space_and_use_tcp_otherwise(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    done = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", SCRIPT, json.dumps(SCENES)],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path]), "TMPDIR": str(tmp),
             "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    why = WHY.format(tmp=tmp, size=SharedMemoryLayout(4).size)
    refusal = found.pop("asked for")
    assert f"LaunchError: transport='shm' cannot be used: {why}; use transport='auto' or 'tcp'" in refusal
    assert {name: row[0] for name, row in found.items()} == {
        name: "tcp" if name == "no space" else "shm" for name in SCENES
    }
    assert {row[1] for name, row in found.items() if name != "no space"} == {ALL}
    assert found["no space"][1] == why
    assert all(row[2] == pytest.approx(found["no space"][2], rel=1e-5) for row in found.values())
    assert [row[3] for row in found.values()] == [[]] * len(SCENES)
