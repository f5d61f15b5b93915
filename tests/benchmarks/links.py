"""All-reduces over emulated links against their formulas, on 2 to 8 nodes of one machine. Linux only, no root needed.

python tests/benchmarks/links.py [gigabit a second] [megabytes ...]

The formulas know the rate, less the headers of full Ethernet frames (5.9 %), and nothing else: neither the latency of
the emulated switch, far below a millisecond, nor the adding of numbers, nor TCP's slow start.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import shardscope as ss
from shardscope.errors import LaunchError
from shardscope.runtime.emulated import EmulatedNetwork
from shardscope.spec.cluster import EmulatedCluster

NODES = (2, 4, 8)
ROUNDS = 5
PORT = 29_500
SLICE = 1 << 16
"""Bytes of a message of the sliced ring, whose rounds overlap: a slice is sent on while the next one arrives."""


def serve(rank: int, world_size: int, megabytes: list[float]) -> None:
    """One node's part: all algorithms in turn for each size, `ROUNDS` times; rank 0 prints the seconds as JSON."""
    import torch
    import torch.distributed as dist

    from shardscope.training.collectives import RingAllReduce, TreeAllReduce, process_group
    from shardscope.training.meter import Meter

    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    store = dist.TCPStore(EmulatedCluster.address(0), PORT, world_size, is_master=rank == 0, timeout=minute)
    group = process_group.init(
        Meter(), backend="gloo", rank=rank, world_size=world_size, timeout=minute, store=store
    )
    ring, both, tree = RingAllReduce(group), RingAllReduce(group, directions=2), TreeAllReduce(group)
    sliced = RingAllReduce(group, slice_bytes=SLICE)

    def star(tensor: torch.Tensor) -> None:
        """Rank 0 is server and worker."""
        if rank:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
            return
        parts = [torch.empty_like(tensor) for _ in range(world_size - 1)]
        for work in [dist.irecv(part, source) for source, part in enumerate(parts, 1)]:
            work.wait()
        for part in parts:
            tensor.add_(part)
        for work in [dist.isend(tensor, target) for target in range(1, world_size)]:
            work.wait()

    ways = {
        "ring": ring.all_reduce_,
        "ring, 64 KiB slices": sliced.all_reduce_,
        "ring, both ways": both.all_reduce_,
        "pipelined tree": tree.all_reduce_,
        "parameter server": star,
    }
    for size in megabytes:
        tensor = torch.ones(int(size * 1e6) // 4)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(ROUNDS + 1):
            for name, way in ways.items():
                dist.barrier()
                start = time.perf_counter()
                way(tensor)
                dist.barrier()
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        if rank == 0:
            print(json.dumps({"megabytes": size, "seconds": seconds}), flush=True)
    dist.barrier()
    os._exit(0)


def formula(name: str, megabytes: float, cluster: EmulatedCluster) -> float:
    """Seconds by the closed form. Both ways around share a node's one cable, so that the ring's formula holds."""
    from shardscope.analytic.communication import collective_time
    from shardscope.training.collectives.tree import SLICE_BYTES

    algorithm, options = {
        "ring": ("ring", {}),
        "ring, 64 KiB slices": ("ring", {}),
        "ring, both ways": ("ring", {}),
        "pipelined tree": ("pipelined-tree", {"segments": -(-int(megabytes * 1e6) // SLICE_BYTES)}),
        "parameter server": ("parameter-server", {}),
    }[name]
    assert cluster.link is not None
    return float(
        collective_time(
            op="all_reduce",
            algorithm=algorithm,
            num_bytes=megabytes * 1e6,
            workers=cluster.num_devices,
            bandwidth=cluster.link.bandwidth,
            **options,
        )
    )


def measure(cluster: EmulatedCluster, megabytes: list[float]) -> None:
    """Run the nodes, and print medians beside the formulas."""
    count = cluster.num_devices
    command = [sys.executable, __file__, "--node", str(count), *map(str, megabytes)]
    with EmulatedNetwork(cluster) as links:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        nodes = [
            links.popen(
                rank, command, env={**env, "LINKS_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        output = nodes[0].communicate()[0]
        failed = [node.returncode for node in nodes if node.wait()]
    assert not failed, failed
    for line in output.splitlines():
        found = json.loads(line)
        for name, seconds in found["seconds"].items():
            measured, by_formula = statistics.median(seconds), formula(name, found["megabytes"], cluster)
            figures = f"measured {1e3 * measured:8.1f} ms   formula {1e3 * by_formula:8.1f} ms"
            print(
                f"{count} nodes {found['megabytes']:6g} MB  {name:19} {figures}   {measured / by_formula:5.2f} x"
            )


def main() -> None:
    """Measure on each number of nodes, or be a node."""
    if "--node" in sys.argv:
        count, *sizes = sys.argv[2:]
        serve(int(os.environ["LINKS_RANK"]), int(count), [float(size) for size in sizes])
    gigabit, *megabytes = [*map(float, sys.argv[1:])] or [0.1]
    print(f"load {os.getloadavg()[0]:.1f}")
    for nodes in NODES:
        cluster = ss.Cluster.emulated(nodes=nodes, bandwidth=gigabit * 1e9 / 8)
        try:
            measure(cluster, megabytes or [1.0, 4.0, 16.0])
        except LaunchError as error:
            print(f"skipped: {error}")
            return


if __name__ == "__main__":
    main()
