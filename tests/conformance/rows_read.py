"""Which rows a run trained on, step by step, as its model saw them; for runs that are killed and resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardscope as ss
from conformance.runs import wait_for
from conformance.shards import FEATURES, numbers_of


def recording(folder: Path, pause_s: float = 0.0) -> Callable[[], torch.nn.Module]:
    """A model that writes the numbers of the rows of each training batch into a file of its process."""

    def make() -> torch.nn.Module:
        class Recording(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = torch.nn.Linear(FEATURES, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.training:
                    time.sleep(pause_s)
                    with (folder / f"rows-{os.getpid()}").open("a") as file:
                        file.write(" ".join(map(str, numbers_of(x))) + "\n")
                return self.head(x * torch.tensor([1e-4] + [1.0] * (FEATURES - 1)))

        return Recording()

    return make


def rows_by_step(run: ss.Run, folder: Path, *, last: int) -> dict[int, list[int]]:
    """The rows of each global batch up to the step `last`, from the lines that ranks have written into `folder`."""
    first = next((event["step"] for event in run.events("resume")), 0) + 1
    batches: dict[int, list[int]] = {}
    for start in sorted(run.events("start"), key=lambda event: event["rank"]):
        lines = (folder / f"rows-{start['pid']}").read_text().splitlines()
        assert len(lines) >= last - first + 1, f"rank {start['rank']} took {len(lines)} steps"
        for step, line in enumerate(lines, start=first):
            if step <= last:
                batches.setdefault(step, []).extend(map(int, line.split()))
    return batches


def killed_and_resumed(
    job: ss.Job, folder: Path, *, after: int, victim: int, world_size: int, **options: Any
) -> list[int]:
    """Kill a rank after a step, resume on another world size, and return all rows that the weights have been through.

    Args:
        job: A job whose model is `recording`, with checkpoints.
        folder: Where the model writes.
        after: Step after which a rank is killed.
        victim: The rank to kill.
        world_size: Ranks of the second run.
        options: Passed on to `ss.launch`.
    """
    first = ss.launch(job, **options)
    wait_for(lambda: any(event["step"] >= after for event in first.events("step")), first)
    os.kill(next(e["pid"] for e in first.events("start", victim)), signal.SIGKILL)
    with contextlib.suppress(ss.RunFailed):
        first.wait(60)
    second = ss.launch(job.replace(world_size=world_size), resume=first, **options).wait(120)
    resumed = second.events("resume")[0]["step"]
    assert 0 < resumed < job.steps, f"resumed after step {resumed}"
    parts = rows_by_step(first, folder, last=resumed) | rows_by_step(second, folder, last=job.steps)
    assert sorted(parts) == list(range(1, job.steps + 1))
    return [row for step in sorted(parts) for row in parts[step]]
