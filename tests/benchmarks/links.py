"""All-reduces over real links against their formulas: four nodes on this machine, each held to 1 Gbit/s. Linux only.

python tests/benchmarks/links.py [megabytes] [gigabit a second]

Each node is a network namespace of its own, joined by a bridge; a token bucket on both ends of its cable sets the rate.
Needs `ip`, `tc` and `unshare` with user namespaces, but no root. The formulas here know the rate alone: headers, which
take 4 to 5 % of it, the latency, far below a millisecond, and the adding are what they leave out.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

NODES = 4
ROUNDS = 5
HOST, PORT = "10.9.0.1", 29_500


def set_up(gigabit: float) -> None:
    """A bridge, and a namespace a node with a cable to it."""
    shape = f"root tbf rate {gigabit * 1000:.0f}mbit burst 256kb latency 100ms"
    run = lambda command: subprocess.run(command.split(), check=True)
    for command in ("mount -t tmpfs none /run", "ip link set lo up", "ip link add br0 type bridge"):
        run(command)
    run("ip link set br0 up")
    for node in range(NODES):
        inside = f"ip netns exec n{node}"
        for command in (
            f"ip netns add n{node}",
            f"ip link add v{node} type veth peer name eth0 netns n{node}",
            f"ip link set v{node} master br0 up",
            f"tc qdisc add dev v{node} {shape}",
            f"{inside} ip addr add 10.9.0.{node + 1}/24 dev eth0",
            f"{inside} ip link set eth0 up",
            f"{inside} ip link set lo up",
            f"{inside} tc qdisc add dev eth0 {shape}",
        ):
            run(command)


def serve(rank: int, megabytes: float, gigabit: float) -> None:
    """One node's part: all algorithms in turn, `ROUNDS` times; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from shardscope.training.collectives import RingAllReduce, TreeAllReduce, process_group
    from shardscope.training.meter import Meter

    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, PORT, NODES, is_master=rank == 0, timeout=timedelta(seconds=60))
    group = process_group.init(
        Meter(), backend="gloo", rank=rank, world_size=NODES, timeout=timedelta(seconds=60), store=store
    )
    tensor = torch.ones(int(megabytes * 1e6) // 4)
    ring, both, tree = RingAllReduce(group), RingAllReduce(group, directions=2), TreeAllReduce(group)

    def star() -> None:
        """Rank 0 is server and worker."""
        if rank:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
            return
        parts = [torch.empty_like(tensor) for _ in range(NODES - 1)]
        for work in [dist.irecv(part, source) for source, part in enumerate(parts, 1)]:
            work.wait()
        for part in parts:
            tensor.add_(part)
        for work in [dist.isend(tensor, target) for target in range(1, NODES)]:
            work.wait()

    ways = {
        "ring": lambda: ring.all_reduce_(tensor),
        "ring, both ways": lambda: both.all_reduce_(tensor),
        "pipelined tree": lambda: tree.all_reduce_(tensor),
        "parameter server": star,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        report(seconds, megabytes, gigabit)
    dist.barrier()
    os._exit(0)


def report(seconds: dict[str, list[float]], megabytes: float, gigabit: float) -> None:
    """Medians beside the formulas. Both ways around share a node's one cable, so that the ring's formula holds."""
    from shardscope.analytic.communication import collective_time
    from shardscope.training.collectives.tree import SLICE_BYTES

    segments = -(-int(megabytes * 1e6) // SLICE_BYTES)
    formulas = {
        "ring": ("ring", {}),
        "ring, both ways": ("ring", {}),
        "pipelined tree": ("pipelined-tree", {"segments": segments}),
        "parameter server": ("parameter-server", {}),
    }
    print(f"{megabytes:g} MB among {NODES} nodes at {gigabit:g} Gbit/s")
    for name, times in seconds.items():
        algorithm, options = formulas[name]
        formula = collective_time(
            op="all_reduce",
            algorithm=algorithm,
            num_bytes=megabytes * 1e6,
            workers=NODES,
            bandwidth=gigabit * 1e9 / 8,
            **options,
        )
        measured = statistics.median(times)
        both = f"measured {1e3 * measured:8.1f} ms   formula {1e3 * formula:8.1f} ms"
        print(f"{name:18} {both}   {measured / formula:5.2f} x")


def main() -> None:
    """Start again in namespaces of our own, set them up, and start the nodes."""
    if "--inside" not in sys.argv:
        missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
        if missing or subprocess.run(["unshare", "-Urnm", "true"], capture_output=True).returncode:
            print(f"skipped: needs {', '.join(missing) or 'user namespaces'} (iproute2, util-linux)")
            return
        command = ["unshare", "-Urnm", sys.executable, __file__, "--inside", *sys.argv[1:]]
        sys.exit(subprocess.run(command).returncode)
    values = [float(value) for value in sys.argv[1:] if not value.startswith("--")]
    megabytes, gigabit = (*values, *(16.8, 1.0)[len(values) :])
    if "--rank" in sys.argv:
        serve(int(os.environ["LINKS_RANK"]), megabytes, gigabit)
    set_up(gigabit)
    nodes = []
    for rank in range(NODES):
        command = ["ip", "netns", "exec", f"n{rank}", sys.executable, __file__, "--inside", "--rank"]
        settings = {"LINKS_RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        shown = [str(value) for value in (megabytes, gigabit)]
        nodes.append(subprocess.Popen([*command, *shown], env=os.environ | settings, cwd=Path.cwd()))
    sys.exit(max(node.wait() for node in nodes))


if __name__ == "__main__":
    main()
