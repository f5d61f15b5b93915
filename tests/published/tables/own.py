"""Steps that were measured for this project: FSDP2 on one H100, without messages.

One H100 SXM of 80 GB with its limit of 700 W, PyTorch 2.11 (CUDA 13.0), eager: decoders with RMSNorm, rotary positions,
SwiGLU and fused attention, each block in `fully_shard` with bf16 parameters, fused AdamW on float32 ones, and the norm
of gradients clipped. Times are medians of the last 8 of 12 steps.
"""

from __future__ import annotations

from published.rows import published_row
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

_SIZES = {
    "0.4B": {"layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816, "vocab": 50304},
    "1B": {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 5632, "vocab": 32000},
    "2B": {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
}
ONE_H100 = (
    ("0.4B", 2048, 1, 1, False, 0.08108),
    ("0.4B", 2048, 4, 1, False, 0.10793),
    ("0.4B", 2048, 8, 1, False, 0.16033),
    ("0.4B", 1024, 16, 1, False, 0.15227),
    ("0.4B", 2048, 8, 1, True, 0.19995),
    ("1B", 2048, 1, 1, False, 0.07787),
    ("1B", 2048, 2, 4, False, 0.33879),
    ("1B", 2048, 4, 1, False, 0.14268),
    ("1B", 4096, 4, 1, True, 0.33362),
    ("1B", 8192, 1, 1, False, 0.16283),
    ("1B", 16384, 1, 1, True, 0.43530),
    ("2B", 2048, 1, 1, False, 0.08467),
    ("2B", 4096, 1, 4, False, 0.40332),
    ("2B", 8192, 1, 1, False, 0.23278),
)
"""Model, tokens per sequence, micro-batch, micro-batches in a step, whether blocks are recomputed, and seconds of a
step."""


def one_h100() -> list[Row]:
    """Return the rows of `ONE_H100`."""
    return [_row(*row) for row in ONE_H100]


def _row(size: str, seq: int, micro_batch: int, count: int, recomputes: bool, seconds: float) -> Row:
    model = Transformer(
        name=f"llama-like-{size}", **_SIZES[size], seq=seq, gated=True, tied=False, positions="rotary",
        norm="rmsnorm", bias=False,
    )  # fmt: skip
    layout = Layout(
        global_batch=micro_batch * count, micro_batch=micro_batch, recompute="full" if recomputes else "none"
    )
    cluster = Cluster.of("h100-80gb", per_node=1)
    return published_row("FSDP2, one H100", model, cluster, layout, seconds, software="fsdp2")
