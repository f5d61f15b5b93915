"""A long run watched by a Training Lab: how much memory the notebook's kernel takes on.

    python tests/campaigns/soak.py                     25,000 steps of a ring on two ranks
    python tests/campaigns/soak.py --steps 4000 --strategy gossip

A real Jupyter kernel shows a lab and starts the run; this process plays the browser, which reads every message. The
kernel's resident memory is sampled as the steps go by, and its growth over the last three fifths of them is the slope
of a line fitted to the samples. Exits with 1 where that is above the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

BOUND_BYTES = 200
"""Bytes a step that the kernel may grow by."""
COUNTED = 3 / 5
"""The share of the steps, the last ones, over which growth is measured: before them caches and pools fill up."""
START = """
from IPython.display import display
from shardscope_widgets import TrainingLab
lab = TrainingLab(model="mlp", data="digits", strategy={strategy!r}, world_size={world_size}, steps={steps})
display(lab)
run = lab.start()
"""


class Sample(NamedTuple):
    """The kernel's resident bytes when the run had come to a step."""

    step: int
    resident: int


def watch(strategy: str, *, steps: int, world_size: int, samples: int = 200) -> list[Sample]:
    """Samples from the first step to the last."""
    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(env={**os.environ, "SHARDSCOPE_RUNS": folder}, cwd=folder)
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=120)
        try:
            kernel = psutil.Process(manager.provisioner.pid)
            _execute(client, START.format(strategy=strategy, steps=steps, world_size=world_size))
            return list(_sampled(kernel, client, Path(folder), steps, steps // samples))
        finally:
            client.stop_channels()
            manager.shutdown_kernel()


def _execute(client: BlockingKernelClient, code: str) -> None:
    reply = client.execute_interactive(code, timeout=120, output_hook=lambda _: None)
    if reply["content"]["status"] != "ok":
        sys.exit("\n".join(reply["content"]["traceback"]))


def _sampled(kernel: psutil.Process, client: BlockingKernelClient, root: Path, steps: int, every: int):
    due = 0
    while True:
        _read_messages(client)
        step = _last_step(root)
        if step >= due:
            yield Sample(step, kernel.memory_info().rss)
            due = step + every
        if step >= steps or next(root.glob("*/summary.json"), None):
            return


def _read_messages(client: BlockingKernelClient) -> None:
    """Whatever the lab has sent, as a page would."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        try:
            client.get_iopub_msg(timeout=0.1)
        except Exception:  # an empty queue: zmq and asyncio name it differently
            continue


def _last_step(root: Path) -> int:
    """The newest step that rank 0 has written."""
    log = next(root.glob("*/rank-0.jsonl"), None)
    if log is None:
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        lines = file.read().splitlines()[1:]
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "step":
            return int(event["step"])
    return 0


def growth(samples: list[Sample]) -> float:
    """Bytes a step over the last of the steps: the slope of a fitted line."""
    first = samples[-1].step * (1 - COUNTED)
    counted = np.array([sample for sample in samples if sample.step >= first], dtype=float)
    return float(np.polyfit(counted[:, 0], counted[:, 1], 1)[0])


def main() -> None:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25_000)
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    samples = watch(options.strategy, steps=options.steps, world_size=options.world_size)
    for sample in samples[:: max(1, len(samples) // 20)]:
        print(f"step {sample.step:7,}   {sample.resident / 2**20:8.1f} MiB")
    slope = growth(samples)
    print(
        f"{slope:.0f} bytes a step over the last {COUNTED:.0%} of {samples[-1].step:,} steps; bound {BOUND_BYTES}"
    )
    sys.exit(slope > BOUND_BYTES)


if __name__ == "__main__":
    main()
