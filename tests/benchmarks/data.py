"""Training on shards that are larger than memory, and from a source slower than training.

    PYTHONPATH=tests python tests/benchmarks/data.py [gigabytes] [limit in gigabytes]

Prints the memory of ranks that read a generated data set (0.5 GB unless given) of which every row is read, where a
memory limit can be set (as root, with control groups) within that limit for all ranks together; and how much sooner
the second epoch of a slow source is over than the first, if its shards are cached.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil

import shardscope as ss

ROW = 4 * 1024 + 8
GROUP = Path("/sys/fs/cgroup/memory") / f"shardscope-{os.getpid()}"


def generated(num_bytes: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random rows of 4 kB."""
    source, left = np.random.default_rng(0), int(num_bytes // ROW)
    while left:
        count = min(left, 2048)
        left -= count
        yield source.standard_normal((count, 1024), np.float32), source.integers(0, 10, count)


def make_model() -> object:
    """A model so small that reading is what takes time."""
    import torch

    return torch.nn.Linear(1024, 10)


@contextmanager
def limited(num_bytes: float) -> Iterator[bool]:
    """Limit the memory, with page cache, of this process and all that it starts; yields whether that is possible."""
    try:
        GROUP.mkdir()
        (GROUP / "memory.limit_in_bytes").write_text(str(int(num_bytes)))
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"no limit: control groups cannot be set here ({error.strerror})")
        yield False
        return
    try:
        yield True
    finally:
        _dissolve(time.monotonic() + 30)


def _dissolve(deadline: float) -> None:
    """Move all processes out of the group and delete it; those that end meanwhile keep it busy for a moment."""
    while GROUP.exists():
        for pid in (GROUP / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (GROUP.parent / "cgroup.procs").write_text(pid)
        try:
            GROUP.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def most_private_bytes(run: ss.Run) -> tuple[int, int]:
    """The most anonymous and the most resident memory of all ranks together while a run lasts."""
    anonymous = resident = 0
    while run.is_alive:
        ranks = [
            psutil.Process(event["pid"]) for event in run.events("start") if psutil.pid_exists(event["pid"])
        ]
        try:
            found = [process.memory_full_info() for process in ranks]
        except psutil.Error:
            break
        anonymous = max(anonymous, sum(each.rss - each.shared for each in found))
        resident = max(resident, sum(each.rss for each in found))
        time.sleep(0.1)
    return anonymous, resident


def larger_than_memory(folder: Path, gigabytes: float, limit: float) -> None:
    """One epoch over a data set, within a memory limit."""
    started = time.perf_counter()
    shards = ss.write_shards(folder / "large", generated(gigabytes * 1e9), shard_size="16 MB")
    size = sum(path.stat().st_size for path in Path(shards.path).iterdir())
    print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - started:.0f} s")
    batch = 256
    rows = sum(len(np.load(path, mmap_mode="r")) for path in Path(shards.path).iterdir())
    steps = int(rows * 0.9) // batch
    job = ss.Job(
        model=make_model,
        data=shards,
        world_size=2,
        batch=batch,
        steps=steps,
        record=ss.Record(memory_first=0),
    )
    with limited(limit * 1e9) as is_limited:
        run = ss.launch(job, root=folder / "runs")
        seen: list[tuple[int, int]] = []
        watch = threading.Thread(target=lambda: seen.append(most_private_bytes(run)))
        watch.start()
        run.wait()
        watch.join()
        peak = int((GROUP / "memory.max_usage_in_bytes").read_text()) if is_limited else 0
    ((anonymous, resident),) = seen
    limited_to = f", limited to {limit:g} GB (peak {peak / 1e9:.2f} GB with page cache)" if is_limited else ""
    print(
        f"2 ranks read {rows * ROW * 0.9 / 1e9:.2f} GB in {run.summary().wall_s:.0f} s{limited_to}: at most "
        f"{anonymous / 1e6:.0f} MB of private and {resident / 1e6:.0f} MB of resident memory together"
    )


def slow_source(folder: Path) -> None:
    """Two epochs of a slow source, with a cache."""
    rows, per_shard, batch = 960, 48, 48
    shards = ss.write_shards(folder / "slow", next(generated(rows * ROW)), shard_size=per_shard * ROW)
    for name, cache in (("without a cache", None), ("with a cache", "100 MB")):
        data = shards.replace(
            slow=ss.Link(bandwidth="300 kB/s", latency="20 ms"), window=4,
            cache=cache, cache_folder=cache and str(folder / "cache"),
        )  # fmt: skip
        job = ss.Job(
            model=make_model, data=data, world_size=2, batch=batch, steps=2 * (rows * 9 // 10) // batch
        )
        run = ss.launch(job, root=folder / "runs").wait()
        epochs, predicted = run.reduced().epochs, ss.predict(job)
        first, second = (epochs[number].time_s for number in (0, 1))
        print(
            f"{name}: epoch 1 takes {first:.2f} s, epoch 2 {second:.2f} s, {first / second:.1f} times as fast; a step "
            f"of epoch 1 {1e3 * first / len(epochs[0].seconds):.0f} ms on average, predicted "
            f"{1e3 * predicted.step_time_s:.0f} ms"
        )


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    limit = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    with tempfile.TemporaryDirectory(prefix="shardscope-data-") as name:
        larger_than_memory(Path(name), gigabytes, limit)
        slow_source(Path(name))


if __name__ == "__main__":
    main()
