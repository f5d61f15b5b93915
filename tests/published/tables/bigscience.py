"""Published step times of BigScience on 64 V100: DeepSpeed's ZeRO 3, and Megatron-DeepSpeed with a pipeline.

bigscience-workshop/bigscience experiments/gpt2.md@9e64ede (May to October 2021), with the settings of the scripts in
experiments/gpt2-meg-ds-zero and gpt2-meg-ds-3d: 32 heads, sequences of 1,024 tokens, fp16, every layer recomputed, on
the V100-32GB of Jean Zay, in nodes of 4 with 100 Gbit/s a device. The authors warn that the network's speed varies
between runs: the same step of Megatron-LM took 125, 129, 217 and 225 s. So the runs of Megatron-LM alone of that week
are left out, as are runs with a batch that contradicts their other columns, with states on the host, with an earlier
branch, and of models whose sizes are not stated.
"""

from __future__ import annotations

from published.rows import published_row
from published.tables.machines import network
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster, Link
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

ZERO_3 = (
    ("25 May", 4, 48, 122),
    ("27 May", 4, 48, 127),
    ("27 May", 2, 32, 167),
    ("27 May", 1, 16, 184),
    ("1", 4, 48, 119),
    ("2", 4, 48, 115),
    ("3", 4, 52, 124),
    ("4", 2, 32, 159),
    ("5", 2, 32, 158),
    ("6", 2, 36, 176),
    ("7", 4, 56, 161),
    ("8", 2, 38, 178),
    ("9", 1, 18, 197),
    ("10", 1, 20, 219),
    ("15", 4, 24, 71),
    ("17", 2, 16, 88),
)
"""Date or number of the run, tensor-parallel degree, micro-batch, seconds of a GPT with 52 billion parameters, one
micro-batch a step. The inputs of layers are kept on the host (``--checkpoint-in-cpu``); runs that shard them over
tensor ranks instead (12, 13, 14, 16), which layouts cannot say, are left out. The host makes no difference: 14 and 15,
with all else equal, take 72 and 71 s, and 16 and 17 take 87 and 88 s."""

PIPELINES = (
    ("10 June", 64, 1, 16, 4, 1024, 0, 137),
    ("10 June", 64, 1, 16, 4, 4096, 0, 544),
    ("bucket 5e8", 64, 2, 8, 4, 1024, 1, 137),
    ("bucket 1e9", 64, 2, 8, 4, 1024, 1, 141),
    ("bucket 2e9", 64, 2, 8, 4, 1024, 1, 141),
    ("1.1", 64, 2, 8, 2, 1024, 1, 150),
    ("1.2", 64, 2, 8, 2, 1024, 1, 150),
    ("1.3", 64, 2, 8, 3, 1536, 1, 213),
    ("1.4", 64, 2, 8, 3, 1536, 1, 208),
    ("2.1", 48, 2, 8, 4, 1024, 1, 104),
    ("2.2", 48, 2, 8, 4, 1024, 1, 105),
)
"""Date, size of buckets or number of the run; layers, data-parallel and pipeline degrees, micro-batch, batch, ZeRO
stage, seconds. The tensor-parallel degree is 4."""


def bigscience() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    return {
        "DeepSpeed 0.3, V100": [_zero_3(*row) for row in ZERO_3],
        "Megatron-DeepSpeed, V100": [_pipeline(*row) for row in PIPELINES],
    }


def _zero_3(run: str, tensor: int, micro_batch: int, seconds: float) -> Row:
    layout = Layout(
        data=64 // tensor, tensor=tensor, zero=3, micro_batch=micro_batch,
        global_batch=64 // tensor * micro_batch, recompute="full", precision="fp16-mixed", flash_attention=False,
        offload="activations",
    )  # fmt: skip
    return _row("DeepSpeed 0.3, V100", 64, layout, seconds, "deepspeed-0.5", run)


def _pipeline(
    run: str, layers: int, data: int, pipeline: int, micro_batch: int, batch: int, zero: int, seconds: float
) -> Row:
    layout = Layout.model_validate(
        {
            "data": data, "tensor": 4, "pipeline": pipeline, "zero": zero, "micro_batch": micro_batch,
            "global_batch": batch, "recompute": "full", "precision": "fp16-mixed", "flash_attention": False,
        }
    )  # fmt: skip
    return _row("Megatron-DeepSpeed, V100", layers, layout, seconds, "megatron-deepspeed", run)


def _row(table: str, layers: int, layout: Layout, seconds: float, software: str, run: str) -> Row:
    model = Transformer(
        name=f"gpt-{layers}x8192", layers=layers, hidden=8192, heads=32, vocab=50304, seq=1024
    )
    where = Cluster.of(
        "v100-32gb",
        nodes=16,
        per_node=4,
        intra=Link.of("nvlink-2"),
        inter=network(100, "Jean Zay: Omni-Path"),
    )
    return published_row(table, model, where, layout, seconds, software=software, release=run)
