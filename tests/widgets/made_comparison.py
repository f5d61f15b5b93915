"""A comparison of a run that never ran with a prediction that nobody made, for tests of the interface."""

from __future__ import annotations

from shardscope.measure.compare.comparison import ComparedTerm, Comparison

EXACT = {"agrees": True, "by_rank": ((2048.0, 2048.0), (2048.0, 2048.0))}


def made_comparison(label: str = "mine", *, simulated_s: float | None = None) -> Comparison:
    """Return a comparison with each group of terms; with a simulated step if its seconds are given."""
    rows = (
        ComparedTerm("bytes", "ring_all_reduce", "bytes", "all ranks", 4096, 4096, **EXACT),
        ComparedTerm("bytes", "all_gather", "bytes", "all ranks", 1024, 2048, agrees=False),
        ComparedTerm("bytes", "all collectives", "bytes", "all ranks", 5120, 6144, agrees=False),
        ComparedTerm("messages", "ring_all_reduce", "messages", "all ranks", 4, 4, **EXACT),
        ComparedTerm("memory", "parameters", "bytes", "peak per rank", 2**20, 2**20, agrees=True),
        ComparedTerm("memory", "activations", "bytes", "peak per rank", 3 * 2**20, 2 * 2**20),
        ComparedTerm("time", "forward", "s", "rank 0", 0.004, 0.005),
        ComparedTerm("time", "communication", "s", "rank 0", 0.001, 0.002),
        ComparedTerm("time", "ring_all_reduce", "s", "rank 0", 0.001, 0.002, part_of="communication"),
        ComparedTerm("time", "step", "s", "slowest rank", 0.005, 0.02, simulated=simulated_s),
    )
    return Comparison("run-id", label, "this machine", rows, ("A note <of> its own.",))
