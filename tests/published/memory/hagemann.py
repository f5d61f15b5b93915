"""Runs of Llama that ran, or ran out of memory, by Hagemann et al. 2023 (arXiv 2311.05610), on A100-80GB.

Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts@3749c29, data/*.xlsx: all runs with
FlashAttention-2, with and without a fused RMSNorm; those with other attention kernels are left out. Batches have 2,048
sequences of 2,048 tokens, or 512 of 8,192; layouts have the part of them that replicas divide, and ZeRO 1. The
vocabulary of 128,000 words, not tied, follows from the published MFU (14.0, 33.8 and 66.9 billion parameters). The
trainer was published a year later (`FRAMEWORKS["scaling"]`). Its memory model was written from that code, and not
changed after these runs had been predicted with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from published.memory.rows import MemoryRow
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

SIZES = {"13B": (40, 5120, 40, 13824), "30B": (60, 6656, 52, 17920), "65B": (80, 8192, 64, 22016)}
"""Layers, hidden, heads, inner width."""

RUNS: dict[tuple[str, int, int, str, str], str] = {
    ("13B", 2048, 32, "none", "fused"): ("1x1:1|2,4,8 1x2:1,2|4,8 2x1:1,2|4,8 2x2:1,2,4|8 "),
    ("13B", 2048, 32, "none", "fused sequence"): ("2x1:1,2|4,8 2x2:1,2,4|8 "),
    ("13B", 2048, 64, "none", "plain"): ("1x1:|1,2,4 1x2:1,2|4,8 2x1:1,2|4,8 2x2:1,2|4,8 "),
    ("13B", 2048, 64, "none", "fused"): ("1x1:1|2,4,8 1x2:1,2|4,8 2x1:1,2|4,8 2x2:1,2,4|8 "),
    ("13B", 2048, 64, "full", "plain"): ("1x1:1,2,4| 1x2:1,2,4,8| 2x1:1,2,4,8| 2x2:2,4,8| "),
    ("13B", 8192, 64, "none", "fused"): (
        "1x1:|4 1x2:|4 1x4:|4 2x1:|1,2,4 2x2:1|2,4 2x4:1|2,4 4x1:1|2,4 4x2:1|2,4 4x4:1,2|4 8x1:1|2,4 8x2:1|2,4 "
        "8x4:1,2|4 "
    ),
    ("13B", 8192, 64, "none", "fused sequence"): (
        "2x1:|1,2,4 2x2:1|2,4 2x4:1|2,4 4x1:1|2,4 4x2:1|2,4 4x4:1,2|4 8x1:1|2,4 8x2:1,2|4 8x4:1,2|4 "
    ),
    ("13B", 8192, 128, "none", "plain"): (
        "1x1:|1,2,4 1x2:|1,2,4 1x4:|1,2,4 2x1:|1,2,4 2x2:|1,2,4 2x4:1|2,4 4x1:|1,2,4 4x2:1|2,4 4x4:1|2,4 "
    ),
    ("13B", 8192, 128, "none", "fused"): (
        "1x1:|1,2,4 1x2:|1,2,4 1x4:|1,2,4 2x1:|1,2,4 2x2:1|2,4 2x4:1|2,4 4x1:1|2,4 4x2:1|2,4 4x4:1,2|4 "
    ),
    ("13B", 8192, 128, "full", "plain"): (
        "1x1:1|2,4 1x2:1,2|4 1x4:1,2|4 2x1:1|2,4 2x2:1,2|4 2x4:1,2|4 4x1:1,2|4 4x2:1,2|4 4x4:1,2|4 "
    ),
    ("30B", 2048, 64, "none", "fused"): (
        "1x1:|4 1x2:|1,2,4 1x4:1|2,4 2x1:|4 2x2:1|2,4 2x4:1,2|4 4x1:1|2,4 4x2:1,2|4 4x4:1,2,4| "
    ),
    ("30B", 2048, 64, "none", "fused sequence"): (
        "2x1:|4 2x2:1|2,4 2x4:1,2|4 4x1:1,2|4 4x2:1,2,4| 4x4:1,2,4| "
    ),
    ("30B", 2048, 256, "none", "plain"): (
        "1x1:|1,2,4 1x2:|1,2,4 1x4:|1,2,4 2x1:|1,2,4 2x2:1|2,4 2x4:1|2,4 4x1:1|2,4 4x2:1,2|4 4x4:1,2|4 "
    ),
    ("30B", 2048, 256, "none", "fused"): (
        "1x1:|1,2,4 1x2:|1,2,4 1x4:1|2,4 2x1:|1,2,4 2x2:1|2,4 2x4:1,2|4 4x1:1,2|4 4x2:1,2|4 4x4:1,2,4| "
    ),
    ("30B", 2048, 256, "full", "plain"): (
        "1x1:|1,2,4 1x2:1,2|4 1x4:1,2,4| 2x1:1|2,4 2x2:1,2,4| 2x4:1,2,4| 4x1:1,2,4| 4x2:1,2,4| 4x4:1,2,4| "
    ),
    ("30B", 8192, 64, "none", "fused"): (
        "2x2:|1,2,4 2x4:|1,2,4 2x8:|4 2x16:|4 4x2:|1,2,4 4x4:1|2,4 4x8:1|4 4x16:1|4 "
    ),
    ("30B", 8192, 64, "none", "fused sequence"): (
        "2x2:|1,2,4 2x4:|1,2,4 4x2:1|2,4 4x4:1|2,4 4x8:1| 4x16:1| "
    ),
    ("30B", 8192, 128, "none", "plain"): (
        "2x2:|1,2,4 2x4:|1,2,4 2x8:|1,2,4 2x16:|1,2,4 4x2:|1,2,4 4x4:|1,2,4 4x8:|1,2,4 4x16:|1,2,4 "
    ),
    ("30B", 8192, 128, "none", "fused"): (
        "2x2:|1,2,4 2x4:|1,2,4 2x8:|1,2,4 2x16:|1,2,4 4x2:|1,2,4 4x4:1|2,4 4x8:1|2,4 4x16:1|2,4 "
    ),
    ("30B", 8192, 128, "full", "plain"): (
        "2x2:1|2,4 2x4:1,2|4 2x8:1,2|4 2x16:1,2|4 4x2:1,2|4 4x4:1,2|4 4x8:1,2|4 4x16:1,2|4 "
    ),
    ("65B", 2048, 64, "none", "fused"): (
        "2x2:|1,2,4 2x4:|1,2,4 2x8:1|2,4 4x2:1|2,4 4x4:1,2|4 4x8:1,2|4 8x2:1,2|4 8x4:1,2,4| 8x8:1,2,4| "
    ),
    ("65B", 2048, 64, "none", "fused sequence"): (
        "2x2:|1,2,4 2x4:1|2,4 2x8:1|2 4x2:1|2,4 4x4:1,2|4 4x8:1,2| 8x2:1,2| 8x4:1,2| 8x8:1,2| "
    ),
    ("65B", 2048, 128, "none", "plain"): (
        "2x2:|1,2,4 2x4:|1,2,4 2x8:1|2,4 4x2:|1,2,4 4x4:1|2,4 4x8:1|2,4 8x2:1|2,4 8x4:1|2,4 8x8:1|2,4 "
    ),
    ("65B", 2048, 128, "none", "fused"): (
        "2x2:|1,2,4 2x4:1|2,4 2x8:1|2,4 4x2:1|2,4 4x4:1,2|4 4x8:1,2|4 8x2:1,2|4 8x4:1,2|4 8x8:1,2|4 "
    ),
    ("65B", 2048, 128, "full", "plain"): (
        "2x2:1|2,4 2x4:1,2,4| 2x8:1,2,4| 4x2:1,4| 4x4:1,2,4| 4x8:1,2,4| 8x2:1,2,4| 8x4:1,2,4| 8x8:1,2,4| "
    ),
}
"""Size, tokens of a sequence, devices, recomputation, and whether the norm is fused and the sequence parallel. Then,
for each pair of tensor and pipeline degrees, the micro-batches that ran, and those that ran out of memory."""


def hagemann() -> list[MemoryRow]:
    """Return all rows."""
    return [
        _row(setting, tensor, pipeline, micro, fits=fits)
        for setting, runs in RUNS.items()
        for tensor, pipeline, micro, fits in _listed(runs)
    ]


def _listed(runs: str) -> Iterator[tuple[int, int, int, bool]]:
    """Yield tensor and pipeline degrees, the micro-batch, and whether it ran."""
    for run in runs.split():
        degrees, batches = run.split(":")
        tensor, pipeline = map(int, degrees.split("x"))
        for fits, listed in zip((True, False), batches.split("|"), strict=True):
            for micro in filter(None, listed.split(",")):
                yield tensor, pipeline, int(micro), fits


def _row(
    setting: tuple[str, int, int, str, str], tensor: int, pipeline: int, micro: int, *, fits: bool
) -> MemoryRow:
    size, seq, devices, recompute, kinds = setting
    layers, hidden, heads, inner = SIZES[size]
    model = Transformer(
        name=f"llama-{size}", layers=layers, hidden=hidden, heads=heads, ffn=inner, vocab=128000, seq=seq, gated=True,
        tied=False, positions="rotary", norm="rmsnorm", bias=False,
    )  # fmt: skip
    data = devices // (tensor * pipeline)
    together = data * micro
    layout = Layout.model_validate(
        {
            "data": data, "tensor": tensor, "pipeline": pipeline, "zero": 1, "micro_batch": micro,
            "global_batch": (512 if seq > 2048 else 2048) // together * together, "recompute": recompute,
            "sequence_parallel": "sequence" in kinds,
        }
    )  # fmt: skip
    return MemoryRow(
        "Hagemann et al., A100", model, Cluster.of("a100-80gb", nodes=devices // 8), layout, "megatron-core", fits=fits,
        memory="scaling", settings=() if "fused" in kinds else (("norm_copies", 1),),
    )  # fmt: skip
