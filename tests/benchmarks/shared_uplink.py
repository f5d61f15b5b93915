"""How two groups of ranks share the uplink of their node: evenly, or in turn? On an emulated network. Linux only.

python tests/benchmarks/shared_uplink.py [megabit a second]

Two ranks of one node each send a message to a rank of another node with gloo, as two replicas of a pipeline do. The
second begins together with the first, or a part of a message's time later. Times are in units of the time that one
message takes alone by formula. If messages share the link evenly, the first ends at 2 less the delay, the second at 2;
if they take turns, the first ends at 1.
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
from shardscope.runtime.emulated import EmulatedNetwork
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.cluster.emulated import PAYLOAD

SIZES = {16: 20, 64: 20, 1024: 6, 8192: 2}
"""Kilobytes of a message, and how often it is sent."""
DELAYS = (0.0, 0.25, 0.5)
PAIRS, PORT = 2, 29_500


def serve(rank: int, rate: float) -> None:
    """One rank's part: the first `PAIRS` ranks send, the others receive. Rank 0 prints all times as JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    minute = timedelta(seconds=60)
    store = dist.TCPStore(EmulatedCluster.address(0), PORT, 2 * PAIRS, is_master=rank == 0, timeout=minute)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2 * PAIRS, timeout=minute)
    pair = rank % PAIRS
    for (kilobytes, repeats), delay in ((each, delay) for each in SIZES.items() for delay in (None, *DELAYS)):
        message = torch.ones(kilobytes << 8)
        alone_s, ends = message.nbytes / rate, []
        for _ in range(repeats + 1):
            begin = torch.tensor([time.time() + 0.1], dtype=torch.float64)
            dist.broadcast(begin, 0)
            at, end = float(begin), float("nan")
            if delay is not None or not pair:
                if rank >= PAIRS:
                    dist.recv(message, pair)
                    end = time.time()
                else:
                    time.sleep(max(0.0, at + (delay or 0.0) * alone_s * pair - time.time()))
                    dist.send(message, rank + PAIRS)
            found = [torch.zeros(1, dtype=torch.float64) for _ in range(2 * PAIRS)]
            dist.all_gather(found, torch.tensor([(end - at) / alone_s], dtype=torch.float64))
            ends.append([float(each) for each in found[PAIRS:]])
        if rank == 0:
            print(json.dumps({"kilobytes": kilobytes, "delay": delay, "ends": ends[1:]}), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Measure, or be a rank."""
    if "--rank" in sys.argv:
        serve(int(sys.argv[2]), float(sys.argv[3]))
    megabit = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    cluster = ss.Cluster.emulated(nodes=2, bandwidth=f"{megabit:g} Mbit/s")
    rate = megabit * 1e6 / 8 * PAYLOAD
    with EmulatedNetwork(cluster) as network:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            network.popen(
                rank // PAIRS,
                [sys.executable, __file__, "--rank", str(rank), str(rate)],
                env=env,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2 * PAIRS)
        ]
        output = ranks[0].communicate()[0]
        failed = [each.returncode for each in ranks if each.wait()]
    assert not failed, failed
    print(f"{megabit:g} Mbit/s: end of each message; if they share evenly; if they take turns")
    for line in output.splitlines():
        found = json.loads(line)
        ends, delay = [statistics.median(each) for each in zip(*found["ends"], strict=True)], found["delay"]
        if delay is None:
            print(f"{found['kilobytes']:5} KB alone               {ends[0]:.2f}")
            continue
        print(
            f"{found['kilobytes']:5} KB, second {delay:4.2f} later  {ends[0]:.2f} and {ends[1]:.2f};  "
            f"{2 - delay:.2f} and 2.00;  1.00 and 2.00"
        )


if __name__ == "__main__":
    main()
