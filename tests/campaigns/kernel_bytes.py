"""The bytes that runs tell of, against the kernel's own count of its loopback device.

The campaign moves into a network namespace of its own (`unshare`, Linux), where nothing else is sent. A case runs one
job twice, of few steps and of more, so that starting, the final evaluation and the end cancel out. What the kernel has
received in between is freed of the headers of TCP packets and of gloo's messages, and must be what the steps between
tell of in `Run.metrics`, within 1 %.

    PYTHONPATH=tests python tests/campaigns/kernel_bytes.py             # every strategy, alone and with each method
    PYTHONPATH=tests python tests/campaigns/kernel_bytes.py --count 10  # the first ten
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import _campaign
from torch import Tensor, nn

import shardscope as ss
from conformance.wire_bytes import GLOO_HEADER_BYTES
from shardscope.errors import SpecError

TCP_HEADER_BYTES = 66
"""Ethernet, IPv4, and TCP with time stamps: what loopback counts with every packet."""
TOLERANCE = 0.01
FEW, MANY = 4, 12
MORE = {"sign": 60}
"""Steps of what sends so little that starting, which takes up to 100 kB more or less each time, would be seen."""
STRATEGIES: tuple[Any, ...] = (
    "ring", ss.Ring(directions=2), "all-reduce", "tree", "hierarchical", "zero-1", "zero-2", "zero-3",
    ss.Gossip(measure_every=1000), ss.Pipeline(split="even"), "parameter-server", ss.ParameterServer(servers=2),
    ss.ParameterServer(dedicated=True), ss.ParameterServer(mode="async"), ss.ParameterServer(mode="async", servers=2),
    ss.ParameterServer(mode="async", dedicated=True), ss.ParameterServer(mode="ssp", staleness=2),
)  # fmt: skip
METHODS = (
    ss.Compression("none"), ss.Compression("fp16"), ss.Compression("int8"), ss.Compression("qsgd"),
    ss.Compression("sign"),
    ss.Compression("topk", ratio=0.1), ss.Compression("randomk", ratio=0.2), ss.Compression("powersgd", rank=32),
    ss.Compression("local-sgd", every=4),
)  # fmt: skip


class Pause(nn.Module):
    """Makes one rank slow, so that asynchronous servers answer it late."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s = 0.05 if os.environ.get("RANK") == "2" else 0.0

    def forward(self, images: Tensor) -> Tensor:
        """The images as they are."""
        time.sleep(self.pause_s)
        return images


class Layers(nn.Sequential):
    """A million parameters."""

    def __init__(self) -> None:
        super().__init__(
            Pause(), nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 512),
            nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


class Counted(NamedTuple):
    """Bytes of a run: those on the loopback device, without headers, and those that the run reports."""

    kernel: int
    told: int

    def __sub__(self, other: Counted) -> Counted:  # type: ignore[override]
        return Counted(self.kernel - other.kernel, self.told - other.told)


def jobs() -> list[ss.Job]:
    """All that can be: not every method goes with every strategy."""
    found = []
    for strategy, method in product(STRATEGIES, METHODS):
        fields: dict[str, Any] = {
            "steps": MORE.get(method.name, MANY),
            "model": Layers,
            "data": "digits",
            "strategy": strategy,
            "compression": method,
        }
        try:
            found.append(ss.Job(transport="tcp", world_size=3, batch=384, optimizer="adamw", **fields))
        except SpecError:
            continue
    return found


def loopback() -> tuple[int, int]:
    """Bytes and packets that ``lo`` of this namespace has received."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counts,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0]), int(counts[1])


def counted(job: ss.Job, folder: Path) -> Counted:
    """Run the job."""
    bytes_before, packets_before = loopback()
    run = ss.launch(job, root=folder).wait(120)
    bytes_after, packets_after = loopback()
    if run.state != "completed":
        raise RuntimeError(f"{run.state}: {run.error}")
    told = [event for kind in ("step", "traffic") for event in run.events(kind)]
    messages = sum(row["messages"] for event in told for row in event["traffic"].values())
    headers = TCP_HEADER_BYTES * (packets_after - packets_before) + GLOO_HEADER_BYTES * messages
    return Counted(bytes_after - bytes_before - headers, int(run.metrics()["sent_bytes"].sum()))


def case(number: int, _: random.Random) -> _campaign.Outcome:
    """One job, few steps and many; the median of three where the first is off, for the kernel may send twice."""
    job = jobs()[number]
    offs = [compared(job)]
    if abs(offs[0]) > TOLERANCE:
        offs += [compared(job), compared(job)]
    off = median(offs)
    return _campaign.Outcome(
        "as the kernel counts" if abs(off) <= TOLERANCE else "not as the kernel counts",
        violation=abs(off) > TOLERANCE,
        details={"strategy": job.strategy.label, "compression": job.compression.label, "off": offs},
    )


def compared(job: ss.Job) -> float:
    """The kernel's byte count relative to the run's own, minus 1."""
    with tempfile.TemporaryDirectory() as folder:
        few = counted(job.replace(steps=FEW), Path(folder))
        between = counted(job, Path(folder)) - few
    return round(between.kernel / between.told - 1, 5)


def move_into_a_namespace() -> None:
    """Start again where this process alone has a network."""
    if os.environ.get("SHARDSCOPE_CAMPAIGN_NETWORK") == "own":
        return
    os.environ["SHARDSCOPE_CAMPAIGN_NETWORK"] = "own"
    again = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
    os.execvp("unshare", ["unshare", "-Urn", *again])


if __name__ == "__main__":
    move_into_a_namespace()
    _campaign.run(case, cases=len(jobs()), description=__doc__)
