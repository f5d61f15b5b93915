"""Simulations of Chakra traces beside ASTRA-sim's congestion-aware analytical backend: times, and seconds they take.

    python tests/benchmarks/astra_sim.py BINARY [--devices 8 64 256 1024] [--cases ring] [--rounds 5] [--cpu]

BINARY is ``AstraSim_Analytical_Congestion_Aware``; without it, the script says how to build it. Both simulators read
the same files, which Shardscope writes, and all links have the same bandwidth and latency. Both expand collectives into
messages.

What differs, and how each case is set up:

- **Links.** In ASTRA-sim, links join neighbours of a topology, a message waits until its link is free, and one that
  crosses a switch is received whole before it is sent on. Shardscope's ranks have one link out and one in, which
  messages share max-min fairly, and a message occupies both at the same time. On ``Ring`` (between neighbours) and
  ``FullyConnected`` (a link for each pair), a message crosses one link in both simulators, and the times agree. Over a
  ``Switch``, it needs the time of a hop more in ASTRA-sim: in each round of a ring, and once in an incast, in which
  messages that wait for their turn end when messages that share the link do. The column ``explained`` has Shardscope's
  time with this hop added.
- **Ring.** The same rounds and chunks. ``preferred-dataset-splits`` is 1, so that ASTRA-sim runs one ring; with more,
  and one active chunk, rings with a part of the tensor each follow one another, and each pays all latencies.
- **Tree.** The binary tree of ASTRA-sim (``doubleBinaryTree``; with one split one of its two) numbers its nodes in
  order, and its root has one child. Shardscope's is binomial. Both send whole tensors over 2 log2 N hops one after
  another; a parent in the binary tree receives from both children at once, which takes no longer, as each has its own
  link.
- **All-to-all.** ``direct1`` sends to one rank after another, as Shardscope's pairwise exchange does.
- **Endpoints.** ASTRA-sim adds ``endpoint-delay`` (10 ns by default) to each message, and three passes over the chunk
  at ``local-mem-bw`` where it is reduced. Shardscope has neither in its links, so they are as small as possible here (1
  ns; ASTRA-sim fails with 0). In the case with endpoints, the column ``explained`` has their sum added to Shardscope's
  time.
- **Point to point.** ASTRA-sim sends one message of a rank at a time, and the next when that has arrived, so that their
  latencies add up; Shardscope's overlap. In the case with messages at once, each as long as the latency, the column
  ``explained`` has the other latencies added. Elsewhere a rank sends one message after another anyway.
- **Rounding.** ASTRA-sim cuts all times to whole nanoseconds, and its GB are 2^30 bytes.

If all ranks do the same, Shardscope simulates one of them. ``ring, ranks apart`` shows its event loop: each rank
computes for another time first, so that each message is simulated in both.

Seconds are medians of interleaved rounds: of ASTRA-sim's process, and of a call of ``ss.simulate.chakra`` in a Python
that has imported Shardscope and loaded its compiled loop, which is printed too, because it happens once. With
``--cpu``, they are seconds of processor time, for a machine that is busy with other work.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import shardscope as ss
from shardscope.runlog.chakra import COLLECTIVE, COLLECTIVES, COMPUTE, RECEIVE, SEND, TraceNode, write_nodes

BUILD = (
    "no ASTRA-sim given: clone github.com/astra-sim/astra-sim at commit 518bd51, run `git submodule update --init "
    "extern/graph_frontend/chakra extern/network_backend/analytical extern/remote_memory_backend/analytical "
    "extern/helper/fmt extern/helper/spdlog`, `protoc et_def.proto --cpp_out=.` in "
    "extern/graph_frontend/chakra/schema/protobuf and `cmake -S build/astra_analytical -B build/astra_analytical/build "
    "-DBUILDTARGET=congestion_aware && cmake --build build/astra_analytical/build`, and give this script the path of "
    "build/astra_analytical/build/bin/AstraSim_Analytical_Congestion_Aware"
)
START = (
    "import shardscope as ss; "
    "ss.simulate.collective(op='all_to_all', algorithm='pairwise', num_bytes=1 << 20, workers=256, bandwidth=1e9)"
)
DEVICES = (8, 64, 256, 1024)
GB_PER_S, LATENCY_NS = 50, 500
LINK = ss.Link(bandwidth=GB_PER_S * 2.0**30, latency=LATENCY_NS * 1e-9)
TENSOR, MESSAGE = 2**30, 2**20
ENDPOINT_NS, MEMORY_GB_PER_S = 10, 1600
NOTHING = {"endpoint-delay": 1, "local-mem-bw": 10**9}


HEADINGS = f"""\
{"":<30}{"simulated time, ms":>24}{"ours /":>9}{"explained":>10}{"seconds of a run":>22}{"ratio":>9}
{"case":<24}{"ranks":>6}{"ASTRA-sim":>12}{"ours":>12}{"theirs":>9}{"/ theirs":>10}{"ASTRA-sim":>11}{"ours":>11}"""


@dataclass(frozen=True)
class Case:
    """Traces, how ASTRA-sim simulates them, and how Shardscope does."""

    name: str
    write: Callable[[Path, int], None]
    topology: str = "FullyConnected"
    system: Mapping[str, object] = field(default_factory=dict)
    algorithms: Mapping[str, str] = field(default_factory=dict)
    explained: Callable[[Sequence[Path], Case, int], float] | None = None
    """Seconds that the known difference leads to, from files and number of devices; None if there is none."""
    most: int = DEVICES[-1]
    """Largest number of devices."""


def apart(start: Path, devices: int) -> None:
    """Write a trace with an all-reduce before which the ranks compute for different times."""
    about = {"is_cpu_op": False, "comm_type": 0, "comm_size": TENSOR}
    for rank in range(devices):
        work = TraceNode(0, "work", COMPUTE, duration_us=1 + rank, attributes={"is_cpu_op": False})
        write_nodes(
            Path(f"{start}.{rank}.et"), [work, TraceNode(1, "sum", COLLECTIVE, (0,), attributes=about)]
        )


def collective(op: str) -> Callable[[Path, int], None]:
    """Return a function that writes a trace with one collective of all ranks."""
    number = {name: number for number, name in COLLECTIVES.items()}[op]
    about = {"is_cpu_op": False, "comm_type": number, "comm_size": TENSOR}

    def write(start: Path, devices: int) -> None:
        for rank in range(devices):
            write_nodes(Path(f"{start}.{rank}.et"), [TraceNode(0, op, COLLECTIVE, attributes=about)])

    return write


def pipeline(start: Path, devices: int) -> None:
    """Write the step of a pipeline with a stage for each device, as `Simulation.export` does.

    GPipe's schedule allows fewer micro-batches than stages. Untied embeddings need no collective after the passes.
    """
    model = ss.Model.transformer(
        layers=devices, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=64, seq=2048, tied=False
    )
    layout = ss.Layout(
        pipeline=devices, micro_batch=1, global_batch=16, precision="bf16-mixed", schedule="gpipe"
    )
    cluster = ss.Cluster.of("a100-80gb", nodes=devices // 8)
    ss.simulate(model, cluster, layout).export(start, format="chakra")


def job(start: Path, devices: int) -> None:
    """Write the step of a job whose gradients travel around a ring, message by message."""
    made = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=devices, batch=devices)
    ss.simulate(made).export(start, format="chakra")


def at_once(start: Path, devices: int) -> None:
    """Write a trace in which each rank sends a message to every other rank, none of which waits for another."""
    about = {"is_cpu_op": False, "comm_size": round(LINK.latency_s * LINK.bandwidth), "comm_tag": 0}
    for rank in range(devices):
        nodes = []
        for k in range(1, devices):
            to, source = (rank + k) % devices, (rank - k) % devices
            nodes.append(TraceNode(k, "send", SEND, attributes={**about, "comm_dst": to}))
            nodes.append(TraceNode(devices + k, "receive", RECEIVE, attributes={**about, "comm_src": source}))
        write_nodes(Path(f"{start}.{rank}.et"), nodes)


def incast(start: Path, devices: int) -> None:
    """Write a trace in which all other ranks send a message to rank 0 at the same time, as to a parameter server."""
    about = {"is_cpu_op": False, "comm_size": MESSAGE, "comm_tag": 0}
    for rank in range(devices):
        sent = [TraceNode(0, "send", SEND, attributes={**about, "comm_dst": 0})]
        received = [
            TraceNode(source, "receive", RECEIVE, attributes={**about, "comm_src": source})
            for source in range(1, devices)
        ]
        write_nodes(Path(f"{start}.{rank}.et"), sent if rank else received)


def with_first_hop(paths: Sequence[Path], case: Case, _devices: int) -> float:
    """Return Shardscope's time with the way of a message to the switch before."""
    found = ss.simulate.chakra(paths, LINK, algorithms=case.algorithms).step_time_s
    return found + LINK.latency_s + MESSAGE / LINK.bandwidth


def one_at_a_time(paths: Sequence[Path], case: Case, devices: int) -> float:
    """Return Shardscope's time with the latencies of all messages of a rank added up."""
    found = ss.simulate.chakra(paths, LINK, algorithms=case.algorithms).step_time_s
    return found + (devices - 2) * LINK.latency_s


def over_a_switch(paths: Sequence[Path], case: Case, devices: int) -> float:
    """Return Shardscope's time if each message pays its first hop as latency."""
    hop = LINK.latency_s + TENSOR / devices / LINK.bandwidth
    return ss.simulate.chakra(
        paths, LINK.replace(latency_s=LINK.latency_s + hop), algorithms=case.algorithms
    ).step_time_s


def with_endpoints(paths: Sequence[Path], case: Case, devices: int) -> float:
    """Return Shardscope's time with the delay of each message and three passes over memory in each reduction."""
    found = ss.simulate.chakra(paths, LINK, algorithms=case.algorithms).step_time_s
    reduced = 3 * TENSOR / devices / (MEMORY_GB_PER_S * 1e9)
    return found + (2 * devices - 1) * ENDPOINT_NS * 1e-9 + (devices - 1) * reduced


CASES = (
    Case("ring all-reduce", collective("all_reduce"), "Ring", {"all-reduce-implementation": ["ring"]}),
    Case("ring, ranks apart", apart, "Ring", {"all-reduce-implementation": ["ring"]}),
    Case(
        "ring, endpoints", collective("all_reduce"), "Ring",
        {"all-reduce-implementation": ["ring"], "endpoint-delay": ENDPOINT_NS, "local-mem-bw": MEMORY_GB_PER_S},
        explained=with_endpoints,
    ),
    Case(
        "ring, switch", collective("all_reduce"), "Switch", {"all-reduce-implementation": ["ring"]},
        explained=over_a_switch,
    ),
    Case(
        "tree all-reduce", collective("all_reduce"), "FullyConnected",
        {"all-reduce-implementation": ["doubleBinaryTree"]}, {"all_reduce": "tree"},
    ),
    Case("all-to-all", collective("all_to_all"), "FullyConnected", {"all-to-all-implementation": ["direct1"]}),
    Case("pipeline, GPipe", pipeline, "Ring"),
    Case("a job's ring, messages", job, "Ring", most=64),
    Case("incast, switch", incast, "Switch", explained=with_first_hop),
    Case("messages at once", at_once, "FullyConnected", explained=one_at_a_time, most=64),
)  # fmt: skip


class Astra:
    """Runs ASTRA-sim on the traces of a case."""

    def __init__(self, binary: Path, case: Case, folder: Path, devices: int) -> None:
        implementations = [
            f"{op}-implementation" for op in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        ]
        system: dict[str, object] = {
            "scheduling-policy": "LIFO",
            "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": 1,
        }
        system |= {name: ["ring"] for name in implementations} | NOTHING | dict(case.system)
        (folder / "system.json").write_text(json.dumps(system))
        (folder / "memory.json").write_text(json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}))
        (folder / "network.yml").write_text(
            f"topology: [ {case.topology} ]\nnpus_count: [ {devices} ]\n"
            f"bandwidth: [ {GB_PER_S}.0 ]\nlatency: [ {LATENCY_NS}.0 ]\n"
        )
        self.folder, self.devices = folder, devices
        files = {
            "workload": "trace",
            "system": "system.json",
            "remote-memory": "memory.json",
            "network": "network.yml",
        }
        self.command = [str(binary), f"--logging-folder={folder / 'log'}"]
        self.command += [f"--{name}-configuration={folder / file}" for name, file in files.items()]

    def __call__(self) -> float:
        """Return the simulated time of the last rank, in seconds."""
        done = subprocess.run(self.command, cwd=self.folder, capture_output=True, text=True, check=False)
        ends = [int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", done.stdout)]
        if done.returncode or len(ends) != self.devices:
            raise RuntimeError(f"{' '.join(self.command)}: {len(ends)} ranks finished\n{done.stderr[-2000:]}")
        return max(ends) * 1e-9


def timed(call: Callable[[], float], *, cpu: bool = False) -> tuple[float, float]:
    """Return the result and the seconds of a call, with `cpu` those of this process and its children on a processor."""
    begun = seconds(cpu=cpu)
    found = call()
    return found, seconds(cpu=cpu) - begun


def seconds(*, cpu: bool) -> float:
    """Return the time of the clock, or the processor time so far."""
    if not cpu:
        return time.perf_counter()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(binary: Path, case: Case, devices: int, rounds: int, *, cpu: bool) -> None:
    """Print one row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write(folder / "trace", devices)
        paths = [folder / f"trace.{rank}.et" for rank in range(devices)]
        astra = Astra(binary, case, folder, devices)

        def own() -> float:
            return ss.simulate.chakra(paths, LINK, algorithms=case.algorithms).step_time_s

        own()
        pairs = [(timed(astra, cpu=cpu), timed(own, cpu=cpu)) for _ in range(rounds)]
        explained = (
            "" if case.explained is None else f"{case.explained(paths, case, devices) / pairs[0][0][0]:8.4f}"
        )
    (theirs, _), (ours, _) = pairs[0]
    took = [statistics.median(pair[side][1] for pair in pairs) for side in range(2)]
    ratio = statistics.median(a[1] / b[1] for a, b in pairs)
    print(
        f"{case.name:<24}{devices:>6}{theirs * 1e3:>12.3f}{ours * 1e3:>12.3f}{ours / theirs:>9.4f}{explained:>10}"
        f"{took[0]:>11.4f}{took[1]:>11.4f}{ratio:>9.1f}",
        flush=True,
    )


def main() -> None:
    """Print the table, or how to build ASTRA-sim."""
    parser = argparse.ArgumentParser(description="Compare ss.simulate.chakra with ASTRA-sim.")
    parser.add_argument("binary", nargs="?", type=Path)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--cases", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="processor time")
    asked = parser.parse_args()
    if asked.binary is None:
        print(BUILD)
        return
    started = statistics.median(
        timed(lambda: subprocess.run([sys.executable, "-c", START], check=True).returncode)[1]
        for _ in range(3)
    )
    exec(START)
    print(f"Python with Shardscope and its compiled loop: {started:.2f} s, once")
    print(HEADINGS)
    for case in CASES:
        if any(case.name.startswith(name) for name in asked.cases):
            for devices in asked.devices:
                if devices <= case.most:
                    compare(asked.binary, case, devices, asked.rounds, cpu=asked.cpu)


if __name__ == "__main__":
    main()
