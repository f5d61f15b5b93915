"""Memory of data-parallel and sharded runs of GPT, of Llama 2 on 64 A100, and of MLPerf's Llama 3.1 405B.

The peaks are of allocated tensors (``torch.cuda.max_memory_allocated``). Those of MLPerf are logged by the first
device, so by one of the first pipeline stage. They are 1 % lower than predicted on Hopper. On GB200, they hardly fall
with the number of replicas that share the optimizer state, and are 6 % lower to 0.3 % higher than predicted: there,
whole steps were captured in CUDA graphs (``FULL_CUDA_GRAPH``).

Six parts of the memory model were looked up only when these peaks had been seen, so their tables count as fitted: that
DDP copies gradients into buckets (errors of 16 and 19 % before); that products of Blackwell need no transposes of fp8
weights (16 to 22 %); that TransformerEngine kept no placeholder gradients before 2.3, and that stages with the
embedding have fewer layers in flight (5 % together); that logits of Lightning's GPT-2 stay in 16 bits (35 %); and that
early releases of DeepSpeed's ZeRO 3 hold gathered weights until the backward pass (22 %). In the last case, minGPT's
README has evidence besides the peak: with offloading, recomputation saves the same model 2.8 GB, 15 times its
activations.

minGPT's 17B remains 5 % too high: its peak leaves 4 bytes of each parameter of a group for the update, instead of 6.

Of the runs without a peak, the sources say whether they ran: torchtitan's docs/performance.md@0413364 of Llama 2 70B
with two sequences and selective recomputation; Lightning's example (`volta.lightning_run`); and
deepspeedai/DeepSpeedExamples training/autotuning/hf/gpt2-xl/README.md@45b4b71 of GPT-2 XL by Hugging Face without
DeepSpeed, on a node of 16 V100, of which the memory is not stated; 32 GB are assumed, and 16 GB would suffice less.
"""

from __future__ import annotations

from published.memory.rows import MemoryRow
from published.tables.mlperf import mlperf
from published.tables.sharded import sharded
from published.tables.volta import lightning_run
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

MLPERF_PEAKS = {
    "MLPerf, H100": {512: 58.817, 2048: 52.484, 2432: 52.151, 2560: 52.062, 8192: 50.901},
    "MLPerf, H200": {512: 109.067, 1024: 104.846},
    "MLPerf, GB200": {512: 93.521, 1024: 92.1, 1536: 91.631, 2048: 92.802, 2496: 92.422},
}
"""mlcommons/training_results_v5.0@0fdc28f, ``max_memory_usage`` in the logs of Llama 3.1 405B: GiB by the number of
devices, of the submitters of which `mlperf` has the times."""

LIGHTNING_GPT = (
    (48, 1600, 25, 4, 6, 0, 37905.422),
    (48, 1600, 25, 4, 40, 3, 25360.968),
    (60, 4096, 16, 8, 1, 3, 29751.203),
)
"""hpcaitech/ColossalAI-Pytorch-lightning benchmark/gpt/README.md, the first two runs @211e8be, the third one and the
commands in later versions: layers, hidden, heads, devices, micro-batch, ZeRO stage, MB. GPT-2 by Hugging Face, 1,024
tokens, every layer recomputed, A100-40GB; the first run is torch's DDP."""

MINGPT = (
    (15, 3072, 0, "none", 36148.55),
    (15, 3072, 3, "none", 7796.98),
    (21, 8192, 3, "full", 36086.14),
)
"""SeanNaren/minGPT@0139bda README.md: layers, hidden, ZeRO stage, recomputation, MiB. 16 heads, 128 characters of 65
kinds, one sequence a device, 8 A100-40GB; the first run is torch's DDP, the others DeepSpeed's ZeRO 3 between March and
June 2021. The table names activation checkpointing only in the rows that have it beside rows of the same model without
it; the code beside it recomputes every layer, without which the weights of the largest model would not fit."""


def replicas() -> list[MemoryRow]:
    """Return all rows."""
    return [
        *_mlperf(),
        *(_lightning_gpt(*row) for row in LIGHTNING_GPT),
        *(_mingpt(*row) for row in MINGPT),
        *_without_peaks(),
    ]


def _mlperf() -> list[MemoryRow]:
    made = {
        (label, row.layout.num_devices): row
        for label, rows in mlperf().items()
        for row in rows
        if row.model.name.startswith("llama")
    }
    return [
        MemoryRow(
            f"{label}, first stage",
            row.model,
            row.cluster,
            row.layout,
            row.software,
            gib,
            stage=0,
            is_fitted=True,
        )
        for label, peaks in MLPERF_PEAKS.items()
        for devices, gib in peaks.items()
        for row in [made[label, devices]]
    ]


def _sharded(devices: int, micro: int, zero: int, recompute: str) -> Layout:
    return Layout.model_validate(
        {
            "data": devices, "zero": zero, "micro_batch": micro, "global_batch": devices * micro,
            "recompute": recompute, "flash_attention": False,
            "precision": "fp16-mixed" if zero else "fp16-autocast",
        }
    )  # fmt: skip


LIGHTNING_SETTINGS = (("bucket_elements", 2e8), ("logits_bytes", 6))
"""DeepSpeedStrategy sets ``reduce_bucket_size``. The loss (benchmark/gpt/model.py) is in 16 bits: in its backward pass,
the log-softmax and two gradients."""

MINGPT_SETTINGS = (("bucket_elements", 2e8), ("logits_bytes", 6), ("holds_gathered", True))
"""DeepSpeedPlugin sets ``reduce_bucket_size``. On leaving ``zero.Init``, DeepSpeed 0.3.12 and 0.3.13 restored PyTorch's
linear layer, which saves a view of the gathered weight; later releases kept their own, which does not."""


def _lightning_gpt(
    layers: int, hidden: int, heads: int, devices: int, micro: int, zero: int, mb: float
) -> MemoryRow:
    model = _gpt2(layers, hidden, heads)
    where = Cluster.of("dgx-a100-40gb", nodes=1, per_node=devices)
    layout = _sharded(devices, micro, zero, "full")
    name = f"{_name(zero)} of Lightning, A100"
    settings = LIGHTNING_SETTINGS if zero else ()
    return MemoryRow(
        name,
        model,
        where,
        layout,
        _software(zero),
        mb / 1024,
        memory=_memory(zero),
        settings=settings,
        is_fitted=True,
    )


def _mingpt(layers: int, hidden: int, zero: int, recompute: str, mib: float) -> MemoryRow:
    model = Transformer(
        name=f"mingpt-{layers}x{hidden}",
        layers=layers,
        hidden=hidden,
        heads=16,
        vocab=65,
        seq=128,
        tied=False,
    )
    where = Cluster.of("dgx-a100-40gb", nodes=1)
    layout = _sharded(8, 1, zero, recompute)
    name = f"{_name(zero)} of minGPT, A100"
    software, settings = ("deepspeed-0.5", MINGPT_SETTINGS) if zero else ("fsdp2", ())
    return MemoryRow(
        name,
        model,
        where,
        layout,
        software,
        mib / 1024,
        memory=_memory(zero),
        settings=settings,
        is_fitted=True,
    )


def _gpt2(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(
        name=f"gpt2-{layers}x{hidden}", layers=layers, hidden=hidden, heads=heads, vocab=50257, seq=1024
    )


def _name(zero: int) -> str:
    return "ZeRO 3" if zero else "DDP"


def _software(zero: int) -> str:
    return "deepspeed" if zero else "fsdp2"


def _memory(zero: int) -> str:
    """Return the memory model if it is not that of the software; all these runs of PyTorch's used Lightning."""
    return "" if zero else "lightning"


def _without_peaks() -> list[MemoryRow]:
    v100 = "Limits of FSDP, V100"
    dgx_2 = Cluster.of("v100-32gb", nodes=1, per_node=16)
    titan = next(row for row in sharded()["torchtitan, A100"] if row.model.name == "llama-2-70B")
    op = titan.layout.replace(recompute="selective", micro_batch=2, global_batch=128)
    return [
        MemoryRow(v100, *lightning_run(48, "none", 8), "fsdp2", memory="lightning"),
        MemoryRow(v100, *lightning_run(48, "none", 9), "fsdp2", fits=False, memory="lightning"),
        MemoryRow(v100, *lightning_run(96, "full", 32), "fsdp2", memory="lightning"),
        MemoryRow(
            "Limits of DDP, V100", _gpt2(48, 1600, 25), dgx_2, _sharded(16, 1, 0, "none"), "fsdp2", fits=False
        ),
        MemoryRow("Limits of FSDP, A100", titan.model, titan.cluster, op, "torchtitan", fits=False),
    ]
