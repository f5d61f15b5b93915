"""Published step times of V100: Megatron-LM of 2019 and 2021, DeepSpeed 0.3 and 0.5, and FSDP as Lightning ran it.

All runs are in fp16 without fused attention. The runs of Megatron-LM of 2019 and of DeepSpeed are predicted as if
scale, mask and softmax were one fused kernel, which Megatron-LM had only later (the model that DeepSpeed 0.3 ran is a
copy of 2019's: deepspeedai/DeepSpeedExamples Megatron-LM/mpu/transformer.py@a79272c; that of 0.5 is Hugging Face's).
With those operations in pieces and the same constants, errors of 2019's runs and of DeepSpeed 0.3.0 were 17 and 32 %
instead of 9 and 3 %, perhaps because pieces in 16 bits, without a cast to float32, move less than
`analytic.compute.work.SEPARATE_BYTES`. Left out, because a setting is not stated: Megatron-LM 1.0 (May 2020, the shapes
of its models), LiBai's runs of Megatron-LM (the device), ZeRO's and ZeRO-Offload's papers (times are in figures only).
Of runs that were repeated, the first is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from published.formulas import megatron_flops
from published.rows import published_row
from published.tables.machines import V100_16, V100_32, cluster, network
from published.tables.papers import VOCAB, gpt
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster, Link
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

MEGATRON_2019 = (
    (40, 1536, 16, 1, 1, 100),
    (54, 1920, 20, 2, 1, 95),
    (64, 2304, 24, 4, 1, 82),
    (72, 3072, 32, 8, 1, 77),
    (40, 1536, 16, 1, 64, 96),
    (54, 1920, 20, 2, 64, 83),
    (64, 2304, 24, 4, 64, 79),
    (72, 3072, 32, 8, 64, 74),
)
"""nv-adlr/nv-adlr.github.io _projects/megatron-lm.md@2624eac (Megatron-LM, arXiv 1909.08053, figure 5), table 1 and
figure 4: layers, hidden, heads, tensor- and data-parallel degrees, and the FLOP/s per device in per cent of the first
run's. Figure 4 is an image (weak_scaling.jpg); the text has the 39 TFLOP/s of the first run and the 77 and 74 % of the
largest model. Sequences of 1,024 tokens, 8 in a batch of each replica, every layer recomputed, on DGX-2H (16 V100 of
32 GB with 300 GB/s both ways, 100 GB/s between nodes)."""

FIRST_STEP_S = 1.288 * 62.4 / 39
"""Seconds of the first run of `MEGATRON_2019`, which does 39 TFLOP/s: _projects/megatron-lm-v1.md of the same commit
has 1,288 ms for the same model and batch at 62.4 TFLOP/s."""

MEGATRON_2021 = (
    (1, 1, 1, 2, 2, 16, 1536, 16, 464.12, 43.25),
    (8, 1, 1, 2, 16, 16, 1536, 16, 480.96, 41.74),
    (16, 1, 1, 2, 32, 16, 1536, 16, 664.46, 30.21),
    (32, 1, 1, 2, 64, 16, 1536, 16, 683.51, 29.37),
    (1, 1, 1, 8, 8, 12, 768, 12, 611.2, 32.63),
    (1, 8, 1, 16, 16, 16, 1536, 16, 692.44, 28.99),
    (1, 16, 1, 16, 16, 16, 3072, 32, 5610.23, 6.22),
    (1, 32, 1, 16, 16, 32, 3072, 32, 13037.85, 2.60),
    (2, 4, 1, 8, 16, 16, 1536, 16, 576.48, 34.82),
    (4, 2, 1, 4, 16, 16, 1536, 16, 593.68, 33.81),
    (2, 8, 1, 8, 16, 24, 2304, 24, 1313.52, 23.00),
    (4, 8, 1, 8, 32, 24, 2304, 24, 1508.48, 20.03),
    (8, 1, 4, 2, 512, 16, 1536, 16, 4893.55, 32.82),
    (1, 8, 4, 16, 512, 24, 2304, 24, 22166.85, 21.80),
    (2, 4, 4, 8, 512, 24, 2304, 24, 15331.23, 31.53),
    (2, 8, 2, 8, 512, 24, 2304, 24, 16281.51, 29.69),
)
"""Oneflow-Inc/DLPerf Megatron-LM/README.md@c89430b (May 2021): data, tensor and pipeline degrees, micro-batch, batch,
layers, hidden, heads, milliseconds, TFLOP/s per device. Sequences of 2,048 tokens, every layer recomputed
(``--checkpoint-activations``), on nodes of 8 V100-16GB with one 100 Gbit/s port."""

DEEPSPEED_2020 = ((1, 0, 198.6), (1, 1, 195.8), (2, 0, 269.0), (2, 1, 261.0), (4, 0, 533.0), (4, 1, 506.0))
"""Oneflow-Inc/DLPerf DeepSpeed/Megatron-LM/README.md@c89430b (DeepSpeed 0.3.0, December 2020): nodes, ZeRO stage,
sequences per second of GPT-2 small with 1,024 tokens, 4 sequences a device, on the same nodes."""

GPT2_TUNED = (
    ("gpt2", 12, 768, 12, 8, 397.827),
    ("gpt2", 12, 768, 12, 15, 431.586),
    ("gpt2-medium", 24, 1024, 16, 4, 142.211),
    ("gpt2-medium", 24, 1024, 16, 6, 163.3),
    ("gpt2-large", 36, 1280, 20, 2, 56.797),
    ("gpt2-large", 36, 1280, 20, 3, 69.061),
    ("gpt2-xl", 48, 1600, 25, 1, 27.462),
)
"""deepspeedai/DeepSpeedExamples training/autotuning/hf/gpt2*/README.md@45b4b71 (November 2021, transformers 4.12, so
DeepSpeed before 0.5.9): layers, hidden, heads, micro-batch, sequences per second of all devices, with ZeRO 1 and
sequences of 1,024 tokens. One node of 16 V100, so a DGX-2, of which the memory is not stated; it has 32 GB."""

LIGHTNING_FSDP = (
    (48, "none", 1, 823),
    (48, "none", 2, 754),
    (48, "none", 4, 744),
    (48, "none", 7, 748),
    (48, "full", 8, 1024),
    (48, "full", 16, 1097),
    (48, "full", 32, 1575),
    (48, "full", 64, 2748),
    (96, "full", 8, 2054),
    (96, "full", 16, 2098),
)
"""Lightning's example "Efficient Training of Large Language Models" (late 2022: FSDP through LightningLite, minGPT; the
README.md beside its train.py and train_cloud.py, whose repository is no longer known): layers, recomputation,
micro-batch, milliseconds. Width 1,600, 25 heads, 128 tokens per sequence, the 65 characters of tiny Shakespeare as
vocabulary, on one p3.8xlarge (4 V100-16GB). Left out are the runs of which it says that the allocator had to retry, and
those on several machines, whose network it does not name.

What was timed may not be the step alone: train.py times each step inside a counter of FLOPs, which counts those of
backward passes and of recomputation, so it handles each operation in Python. And PyTorch's checkpoint did not stop
early before 2.1, which is not modelled. So nothing is fitted to the table, but it is scored, because tables are not
chosen by their errors.
"""

NODE: dict[str, Any] = {
    "intra": Link.of("nvlink-2"), "inter": network(12.5, "DLPerf: one EDR port of 100 Gbit/s per node"),
}  # fmt: skip


def volta() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    return {
        "Megatron-LM 2019, V100": [_megatron_2019(*row) for row in MEGATRON_2019],
        "Megatron-LM 2021, V100": [_megatron_2021(*row) for row in MEGATRON_2021],
        "DeepSpeed 0.3.0, V100": [_deepspeed(*row) for row in DEEPSPEED_2020],
        "DeepSpeed 0.5, V100": [_tuned(*row) for row in GPT2_TUNED],
        "FSDP of Lightning, V100": [_lightning(*row) for row in LIGHTNING_FSDP],
    }


_layout = partial(Layout, precision="fp16-mixed", flash_attention=False)


def _megatron_2019(layers: int, hidden: int, heads: int, tensor: int, replicas: int, per_cent: int) -> Row:
    model = gpt(layers, hidden, heads).replace(seq=1024)
    inter = network(50, "Megatron-LM: 100 GB/s per DGX-2H, which has 16 devices")
    devices = tensor * replicas
    where = cluster(V100_32, devices, intra=Link.of("nvlink-2"), inter=inter, per_node=min(16, devices))
    layout = _layout(data=replicas, tensor=tensor, micro_batch=8, global_batch=8 * replicas, recompute="full")
    first = float(megatron_flops(8, 1024, *MEGATRON_2019[0][:2], VOCAB))
    work = float(megatron_flops(8, 1024, layers, hidden, VOCAB)) / first
    seconds = FIRST_STEP_S * work / (tensor * per_cent / 100)
    return published_row("Megatron-LM 2019, V100", model, where, layout, seconds)


def _megatron_2021(
    data: int, tensor: int, pipeline: int, micro: int, batch: int, layers: int, hidden: int, heads: int, ms: float,
    _tflops: float,
) -> Row:  # fmt: skip
    layout = _layout(
        data=data, tensor=tensor, pipeline=pipeline, micro_batch=micro, global_batch=batch, recompute="full"
    )
    devices = layout.num_devices
    where = cluster(V100_16, devices, **NODE, per_node=min(8, devices))
    return published_row("Megatron-LM 2021, V100", gpt(layers, hidden, heads), where, layout, ms / 1e3)


def _deepspeed(nodes: int, zero: int, rate: float) -> Row:
    model = Transformer(name="gpt2-small", layers=12, hidden=768, heads=12, vocab=50304, seq=1024)
    layout = _layout(data=8 * nodes, zero=zero, micro_batch=4, global_batch=32 * nodes)
    where = cluster(V100_16, 8 * nodes, **NODE)
    seconds = layout.global_batch / rate
    return published_row("DeepSpeed 0.3.0, V100", model, where, layout, seconds, software="deepspeed-0.5")


def gpt2_run(
    name: str, layers: int, hidden: int, heads: int, micro: int, zero: int = 1
) -> tuple[Transformer, Cluster, Layout]:
    """Return the model, the machine and the layout of GPT-2 by Hugging Face on the 16 V100 of a DGX-2."""
    model = Transformer(name=name, layers=layers, hidden=hidden, heads=heads, vocab=50257, seq=1024)
    layout = _layout(data=16, zero=zero, micro_batch=micro, global_batch=16 * micro)
    where = cluster(V100_32, 16, intra=Link.of("nvlink-2"), inter=NODE["inter"], per_node=16)
    return model, where, layout


def _tuned(name: str, layers: int, hidden: int, heads: int, micro: int, rate: float) -> Row:
    run = gpt2_run(name, layers, hidden, heads, micro)
    return published_row("DeepSpeed 0.5, V100", *run, run[-1].global_batch / rate, software="deepspeed-0.5")


def lightning_run(layers: int, recompute: str, micro: int) -> tuple[Transformer, Cluster, Layout]:
    """Return the model, the machine and the layout of one of Lightning's runs on four V100."""
    model = Transformer(
        name=f"mingpt-{layers}x1600", layers=layers, hidden=1600, heads=25, vocab=65, seq=128, tied=False
    )
    layout = _layout(data=4, zero=3, micro_batch=micro, global_batch=4 * micro, recompute=recompute)
    return model, Cluster.of("p3.16xlarge", nodes=1, per_node=4), layout


def _lightning(layers: int, recompute: str, micro: int, ms: float) -> Row:
    run = lightning_run(layers, recompute, micro)
    return published_row("FSDP of Lightning, V100", *run, ms / 1e3, software="fsdp2-2.10")
