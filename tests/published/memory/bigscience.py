"""Memory of runs by BigScience, with Megatron-DeepSpeed and DeepSpeed (bigscience-workshop/bigscience@9e64ede).

Most figures are what nvidia-smi showed for the fullest GPU, rounded to GB. Some runs ran out of memory. Two logs have
the peak of allocated tensors. All runs recompute every layer, unless noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from published.memory.rows import MemoryRow
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

FP16: tuple[Any, ...] = (
    (14400, 8, 32, 1, 8, 1, ((1, 67),)),
    (14400, 80, 96, 1, 8, 10, ((1, 73),)),
    (14400, 80, 96, 2, 8, 10, ((1, 51),)),
    (14400, 80, 96, 4, 8, 10, ((1, 35), (2, 43), (4, 55), (8, 76))),
    (14400, 80, 96, 6, 8, 8, ((1, 36),)),
    (14400, 80, 96, 9, 8, 5, ((1, 44),)),
    (14400, 80, 96, 12, 8, 4, ((1, 47),)),
    (13824, 80, 64, 4, 8, 10, ((1, 33), (2, 39), (4, 53), (8, 73))),
    (13824, 84, 64, 4, 8, 12, ((2, 39), (4, 52))),
    (13824, 84, 64, 8, 8, 6, ((2, 65), (4, 56))),
    (14336, 6, 64, 1, 8, 1, ((2, 54),)),
    (14336, 10, 64, 1, 8, 1, ((1, 80),)),
    (14336, 72, 64, 4, 8, 12, ((1, 29), (2, 37), (4, 49), (8, 69))),
    (14336, 72, 64, 8, 8, 6, ((1, 38), (2, 44), (4, 56), (6, 66))),
    (14336, 72, 64, 6, 8, 8, ((4, 52),)),
    (14336, 72, 64, 12, 8, 4, ((2, 53), (4, 59))),
    (14336, 72, 64, 24, 8, 2, ((1, 65), (2, 76))),
    (14336, 72, 64, 48, 8, 1, ((1, None),)),
    (14336, 72, 64, 8, 4, 12, ((2, 44), (4, 60))),
    (14336, 72, 64, 16, 4, 6, ((2, 57), (4, 75))),
    (14336, 72, 64, 16, 2, 12, ((2, 63),)),
    (14336, 72, 64, 32, 2, 6, ((1, None), (2, None))),
    (14336, 72, 64, 8, 2, 24, ((1, 44), (2, 53))),
    (14336, 72, 16, 8, 8, 6, ((4, 54),)),
    (14336, 72, 112, 8, 8, 6, ((4, 53),)),
    (14336, 72, 256, 8, 8, 6, ((4, 54),)),
    (12288, 96, 64, 8, 1, 48, ((1, 58),)),
    (13824, 78, 64, 8, 4, 12, ((2, 48),)),
    (13824, 78, 96, 8, 8, 6, ((4, 59),)),
    (13824, 78, 96, 16, 4, 6, ((4, 75),)),
    (12288, 106, 96, 8, 4, 12, ((2, 44),)),
)  # fmt: skip
"""train/tr11-176B-ml/chronicles-prequel.md, 17 to 27 February 2022: width, layers, heads, data, tensor, pipeline; then
pairs of micro-batch and GB, None if it ran out of memory. ZeRO 1 on A100-80GB. Of repeated runs, the first."""

BF16: tuple[Any, ...] = (
    (12288, 106, 64, 8, 4, 12, ((2, 67),)),
    (12288, 106, 96, 8, 4, 12, ((2, 65), (4, 79))),
    (12288, 100, 64, 16, 4, 6, ((1, None), (2, None))),
    (12288, 100, 64, 8, 8, 6, ((2, 61), (4, 72))),
    (13312, 82, 64, 4, 8, 12, ((4, 52),)),
    (13312, 82, 64, 8, 4, 12, ((2, 63), (4, 74))),
    (13312, 82, 104, 8, 4, 12, ((2, 62),)),
    (13312, 94, 128, 8, 4, 12, ((2, 67),)),
    (14336, 70, 64, 4, 8, 12, ((2, 40),)),
    (14336, 70, 64, 8, 4, 12, ((2, 59), (4, 73))),
    (14336, 70, 112, 8, 4, 12, ((2, 59),)),
    (14336, 82, 128, 8, 4, 12, ((2, None),)),
)  # fmt: skip
"""The same, 28 February 2022, with the optimizer that accumulates in float32."""

SMALL = (
    ("v100-32gb", "full", 1, 1, 8, (1, 2, 4, 8), None),
    ("v100-32gb", "full", 1, 2, 4, (1, 2, 8), 16),
    ("v100-32gb", "full", 1, 4, 2, (1, 8), None),
    ("v100-32gb", "full", 2, 1, 4, (1,), None),
    ("v100-32gb", "none", 1, 1, 8, (1,), None),
    ("v100-32gb", "none", 1, 2, 4, (1,), None),
    ("v100-32gb", "none", 1, 4, 2, (1, 2), None),
    ("v100-32gb", "none", 2, 1, 4, (1,), None),
    ("v100-16gb", "full", 1, 1, 8, (1,), None),
    ("v100-16gb", "full", 1, 2, 4, (1, 2, 4), 8),
    ("v100-16gb", "full", 1, 4, 2, (1, 4), 8),
    ("v100-16gb", "full", 1, 8, 1, (1, 4), 8),
)
"""experiments/tr3m-1B3.md, a model with 1.3 billion parameters on two nodes of four: device, recomputation, tensor,
pipeline, data, micro-batches that ran, and the one that ran out of memory. Its GB are not of the fullest GPU."""

ZERO_3 = (
    (4, 16, (48, 52, 56), None),
    (2, 32, (32, 36, 38), None),
    (1, 64, (18, 20), 22),
)
"""experiments/gpt2.md, "Megatron + Deepspeed ZeRO": 52 billion parameters on 64 V100-32GB: tensor, data, micro-batches
that ran, and the one that ran out of memory. Activations are offloaded (``--checkpoint-in-cpu``); runs that sharded
them over tensor ranks instead are left out, because layouts cannot say so."""

ZERO_3_SETTINGS = (("bucket_elements", 8192.0**2), ("live_elements", 1e9 + 0.9 * 8192**2))
"""reduce_bucket_size, and stage3_max_live_parameters with stage3_prefetch_bucket_size, as the log prints them."""


def bigscience() -> dict[str, list[MemoryRow]]:
    """Return the rows by table name."""
    bloom = [
        _bloom(precision, sizes, micro, gb)
        for precision, table in (("fp16-mixed", FP16), ("bf16-mixed", BF16))
        for *sizes, runs in table
        for micro, gb in runs
    ]
    return {
        "BLOOM prequel, A100": bloom,
        "GPT 1.3B, V100": [row for sizes in SMALL for row in _small(*sizes)],
        "DeepSpeed pipeline, V100": [_pipeline()],
        "DeepSpeed ZeRO 3, V100": [row for sizes in ZERO_3 for row in _zero_3(*sizes)],
    }


def _bloom(precision: str, sizes: Sequence[int], micro: int, gb: int | None) -> MemoryRow:
    hidden, layers, heads, data, tensor, pipeline = sizes
    model = Transformer(
        name=f"bloom-{layers}x{hidden}", layers=layers, hidden=hidden, heads=heads, vocab=250880, seq=2048,
        positions="alibi", embedding_norm=True,
    )  # fmt: skip
    layout = Layout.model_validate(
        {
            "data": data, "tensor": tensor, "pipeline": pipeline, "zero": 1, "recompute": "full", "micro_batch": micro,
            "global_batch": 2048 // (data * micro) * data * micro, "flash_attention": False, "precision": precision,
        }
    )  # fmt: skip
    nodes = data * tensor * pipeline // 8
    return MemoryRow(
        "BLOOM prequel, A100", model, Cluster.of("a100-80gb", nodes=nodes), layout, "megatron-deepspeed",
        None if gb is None else float(gb), "process", fits=gb is not None,
    )  # fmt: skip


def _small(
    device: str,
    recompute: str,
    tensor: int,
    pipeline: int,
    data: int,
    ran: tuple[int, ...],
    too_large: int | None,
) -> list[MemoryRow]:
    model = Transformer(
        name="gpt-1.3B", layers=24, hidden=2048, heads=16, vocab=50304, seq=2048, embedding_norm=True
    )
    where = Cluster.of(device, nodes=2, per_node=4)

    def run(micro: int, *, fits: bool) -> MemoryRow:
        layout = Layout.model_validate(
            {
                "data": data, "tensor": tensor, "pipeline": pipeline, "zero": 1, "recompute": recompute,
                "micro_batch": micro, "global_batch": 512, "flash_attention": False, "precision": "fp16-mixed",
            }
        )  # fmt: skip
        return MemoryRow("GPT 1.3B, V100", model, where, layout, "megatron-deepspeed", fits=fits)

    return [run(micro, fits=True) for micro in ran] + ([run(too_large, fits=False)] if too_large else [])


def _gpt() -> Transformer:
    return Transformer(name="gpt-64x8192", layers=64, hidden=8192, heads=32, vocab=50688, seq=1024)


def _pipeline() -> MemoryRow:
    """experiments/gpt2-meg-ds-3d/meg_ds_3d_gpt2_perf_n16-ds-on.out: max allocated after one step, ranks 0 to 3."""
    layout = Layout(
        tensor=4, pipeline=16, global_batch=1024, micro_batch=4, recompute="full", flash_attention=False,
        precision="fp16-mixed",
    )  # fmt: skip
    where = Cluster.of("v100-32gb", nodes=16, per_node=4)
    return MemoryRow(
        "DeepSpeed pipeline, V100", _gpt(), where, layout, "megatron-deepspeed", 19961.07 / 1024, "allocated"
    )


def _zero_3(tensor: int, data: int, ran: tuple[int, ...], too_large: int | None) -> list[MemoryRow]:
    """The first row's peak is of experiments/gpt2-meg-ds-zero/meg_ds_zero_gpt2_perf_n16-1999616.out."""
    where = Cluster.of("v100-32gb", nodes=16, per_node=4)

    def run(micro: int, *, fits: bool) -> MemoryRow:
        layout = Layout.model_validate(
            {
                "data": data, "tensor": tensor, "zero": 3, "recompute": "full", "micro_batch": micro,
                "global_batch": data * micro, "flash_attention": False, "precision": "fp16-mixed",
                "offload": "activations",
            }
        )  # fmt: skip
        logged = 26118.23 / 1024 if (tensor, micro) == (4, 48) else None
        return MemoryRow(
            "DeepSpeed ZeRO 3, V100", _gpt(), where, layout, "deepspeed-0.5", logged, "allocated", fits=fits,
            settings=ZERO_3_SETTINGS,
        )  # fmt: skip

    return [run(micro, fits=True) for micro in ran] + ([run(too_large, fits=False)] if too_large else [])
