"""Simulations of Chakra traces beside ASTRA-sim's congestion-aware analytical backend: times, and seconds they take.

    python tests/benchmarks/astra_sim.py BINARY [--devices 8 64 256 1024]

BINARY is ``AstraSim_Analytical_Congestion_Aware``. Both simulators read the same files, which Shardscope writes, and
all links have the same bandwidth and latency.

What differs, and how each case is set up:

- **Links.** In ASTRA-sim, links join neighbours of a topology, and a message waits until the link is free. On the way
  over a switch it is received whole before it is sent on. Shardscope's ranks have one link out and one in, which
  messages share max-min fairly, and a message occupies both at the same time. On ``Ring`` (neighbours) and
  ``FullyConnected`` (a link for each pair) a message crosses one link in both, so the times should agree. Over a
  ``Switch`` every message takes twice as long in ASTRA-sim: the column ``explained`` has Shardscope's time with the
  latency and the transfer of the first hop as additional latency.
- **Ring.** Same rounds and chunks. ``preferred-dataset-splits`` is 1, so that ASTRA-sim runs one ring; with more it
  runs as many rings after or beside each other, in alternating directions.
- **Tree.** ASTRA-sim's binary tree (``doubleBinaryTree``, with one split one tree) numbers its nodes in order and has a
  root with one child; Shardscope's is binomial. Both send whole tensors, log2 N up and log2 N down one after another. A
  parent of the binary tree receives from both children at once, which on own links costs nothing.
- **All-to-all.** ``direct1`` sends to one rank after another, as Shardscope's pairwise exchange does.
- **Endpoints.** ASTRA-sim adds ``endpoint-delay`` (10 ns by default) to each message and, where it reduces, three
  passes over the chunk at ``local-mem-bw``. Shardscope leaves both out of links, so they are switched off here, except
  in the case that shows them: the column ``explained`` then has their sum added to Shardscope's time.
- **Point to point.** ASTRA-sim sends one message of a rank at a time and holds the next until the first has arrived,
  so the latency of messages of one rank adds up; Shardscope's overlap. Computations run one at a time in both.
- **Rounding.** ASTRA-sim cuts all times to whole nanoseconds, and its GB are 2^30 bytes.

Seconds are medians of interleaved rounds: of ASTRA-sim's whole process, and of the call of ``ss.simulate.chakra`` in a
Python that has imported Shardscope; what that takes once is printed too.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import shardscope as ss
from shardscope.runlog.chakra import COLLECTIVE, COLLECTIVES, TraceNode, write_nodes

BUILD = (
    "no ASTRA-sim given: to compare with it, run `git clone --recursive https://github.com/astra-sim/astra-sim && cd "
    "astra-sim && git checkout 518bd51 && git submodule update --recursive && build/astra_analytical/build.sh -t "
    "congestion_aware` (needs cmake, a C++17 compiler and protobuf), and give this script the path of "
    "build/astra_analytical/build/bin/AstraSim_Analytical_Congestion_Aware"
)
DEVICES = (8, 64, 256, 1024)
GB_PER_S, LATENCY_NS = 50, 500
LINK = ss.Link(bandwidth=GB_PER_S * 2.0**30, latency=LATENCY_NS * 1e-9)
TENSOR = 2**30
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


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Return the result and the seconds of a call."""
    begun = time.perf_counter()
    found = call()
    return found, time.perf_counter() - begun


def compare(binary: Path, case: Case, devices: int, rounds: int) -> None:
    """Print one row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write(folder / "trace", devices)
        paths = [folder / f"trace.{rank}.et" for rank in range(devices)]
        astra = Astra(binary, case, folder, devices)

        def own() -> float:
            return ss.simulate.chakra(paths, LINK, algorithms=case.algorithms).step_time_s

        own()
        pairs = [(timed(astra), timed(own)) for _ in range(rounds)]
        explained = (
            "" if case.explained is None else f"{case.explained(paths, case, devices) / pairs[0][0][0]:8.4f}"
        )
    (theirs, _), (ours, _) = pairs[0]
    seconds = [statistics.median(pair[side][1] for pair in pairs) for side in range(2)]
    ratio = statistics.median(a[1] / b[1] for a, b in pairs)
    print(
        f"{case.name:<24}{devices:>6}{theirs * 1e3:>12.3f}{ours * 1e3:>12.3f}{ours / theirs:>9.4f}{explained:>10}"
        f"{seconds[0]:>11.4f}{seconds[1]:>11.4f}{ratio:>9.1f}",
        flush=True,
    )


def main() -> None:
    """Print the table, or how to build ASTRA-sim."""
    parser = argparse.ArgumentParser(description="Compare ss.simulate.chakra with ASTRA-sim.")
    parser.add_argument("binary", nargs="?", type=Path)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--cases", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.binary is None:
        print(BUILD)
        return
    command = [sys.executable, "-c", "import shardscope as ss; ss.simulate.chakra"]
    started = statistics.median(
        timed(lambda: subprocess.run(command, check=True).returncode)[1] for _ in range(3)
    )
    print(f"Python with Shardscope imported: {started:.2f} s, once")
    print(HEADINGS)
    for case in CASES:
        if any(case.name.startswith(name) for name in asked.cases):
            for devices in asked.devices:
                if devices <= case.most:
                    compare(asked.binary, case, devices, asked.rounds)


if __name__ == "__main__":
    main()
