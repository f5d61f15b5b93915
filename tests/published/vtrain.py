"""vTrain's measured Megatron-DeepSpeed steps (Bang et al. 2024; VIA-Research/vTrain, data/ground_truth_*.csv).

A100 cluster with 8 devices per node; 1F1B, gradients reduced after the last backward pass, attention in separate
kernels. The vocabulary is not stated; Megatron's 51,200 is assumed.

The repository sets ``use_checkpoint`` for every row, and the multi-node times agree with full recomputation. The
single-node times do not: at 2,048 hidden and micro-batches of 8 they would imply 212 TFLOP/s of the device's 312, with
attention unfused, and constants fitted to them miss the multi-node rows by 22 %. If they are taken as runs without
recomputation, the two tables agree: constants fitted to the single-node rows alone are then 11 % off on the multi-node
ones. So no recomputation is assumed for the single-node rows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.tables.machines import A100_80, NVLINK3, cluster, network
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.layout import Layout, Recompute
from shardscope.spec.model import Transformer

COLUMNS = (
    "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
    "tensor parallelism", "data parallelism", "pipeline parallelism",
)  # fmt: skip
TIME = "iteration time (ms)"
NETWORK = network(100, "vTrain's configuration: 800 Gbit/s a node of 8 devices")


def rows(block: Mapping[str, Any], dataset: str, *, recompute: Recompute) -> list[Row]:
    """The rows of one of the two tables."""
    columns = block["columns"]
    return [_row(dict(zip(columns, values, strict=True)), dataset, recompute) for values in block["rows"]]


def _row(cells: Mapping[str, Any], dataset: str, recompute: Recompute) -> Row:
    devices, batch, micro, hidden, heads, layers, seq, tensor, data, pipeline = (
        int(cells[c]) for c in COLUMNS
    )
    return Row(
        dataset=dataset,
        model=Transformer(
            name=f"gpt-{layers}x{hidden}", layers=layers, hidden=hidden, heads=heads, vocab=51200, seq=seq
        ),
        cluster=cluster(A100_80, max(devices, 8), intra=NVLINK3, inter=NETWORK),
        layout=Layout(
            data=data, tensor=tensor, pipeline=pipeline, global_batch=batch, micro_batch=micro, recompute=recompute,
            flash_attention=False, precision="fp16-mixed",
        ),
        seconds=cells[TIME] / 1e3,
        inputs={name: cells[name] for name in COLUMNS},
        software="megatron-deepspeed",
    )  # fmt: skip
