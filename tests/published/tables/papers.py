"""Step times copied from papers.

Settings that a paper does not state are assumed. For Narayanan's table 1: micro-batches of 4 without a pipeline and of
1 with a pipeline, or of 2 where the fused softmax of that time, which had no alternative, needs it (heads x sequences
must be a multiple of four); and two (or three) virtual stages if the layers allow it. For Llama 3: four virtual stages
and ZeRO 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from published.formulas import megatron_flops
from published.rows import published_row
from published.tables.machines import A100_80, H100, NVLINK3, NVLINK4, cluster, network
from shardscope.analytic.compute.flops import model_flops
from shardscope.analytic.compute.work import Split, attention_core
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.layout import Layout, Recompute
from shardscope.spec.model import Transformer

LLAMA: Mapping[str, Mapping[str, int]] = {
    "llama3.1-8B": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32},
    "llama3.1-70B": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64},
    "llama3.1-405B": {"layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128},
}
SELENE = network(200, "Narayanan et al. 2021, section 5: 8 x 200 Gbit/s HDR InfiniBand per node")
META = network(400, "Llama 3, arXiv 2407.21783, section 3.3.1: 400 Gbit/s RoCE per device")
VOCAB, SEQ = 51200, 2048

MEGATRON_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
)
"""Narayanan et al. 2021 (SC21, arXiv 2104.04473), table 1: parameters (10^9), heads, hidden, layers, tensor, pipeline,
devices, batch, achieved TFLOP/s per device, per cent of peak, total PFLOP/s."""

MEGATRON_2 = (
    ("zero3", 174.6, 1536, 384, 4, 144, 90),
    ("zero3", 174.6, 1536, 768, 2, 88, 74),
    ("zero3", 174.6, 1536, 1536, 1, 44, 74),
    ("zero3", 529.6, 2560, 640, 4, 138, 169),
    ("zero3", 529.6, 2240, 1120, 2, 98, 137),
    ("zero3", 529.6, 2240, 2240, 1, 48, 140),
    ("ptdp", 174.6, 1536, 384, 1, 153, 84),
    ("ptdp", 174.6, 1536, 768, 1, 149, 43),
    ("ptdp", 174.6, 1536, 1536, 1, 141, 23),
    ("ptdp", 529.6, 2240, 560, 1, 171, 156),
    ("ptdp", 529.6, 2240, 1120, 1, 167, 80),
    ("ptdp", 529.6, 2240, 2240, 1, 159, 42),
)
"""Narayanan et al. 2021, table 2: scheme, parameters (10^9), batch, devices, micro-batch, TFLOP/s per device, days for
300 x 10^9 tokens."""

MEGATRON_SIZES = {174.6: (96, 12288, 96, 8, 12), 529.6: (105, 20480, 128, 8, 35)}
"""The two models of table 2: layers, hidden, heads; tensor- and pipeline-parallel degrees of PTD-P."""

KORTHIKANTI_5 = (
    ("22B", 48, 6144, 64, 1, 8, 4, 4, 1, 1.42, 1.10, 41.5, 43.7),
    ("175B", 96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75, 51.4, 52.8),
    ("530B", 105, 20480, 128, 35, 280, 280, 1, 3, 49.05, 37.83, 56.0, 57.0),
    ("1T", 128, 25600, 160, 64, 512, 512, 1, 1, 94.42, 71.49, 56.3, 57.0),
)
"""Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5: name, layers, hidden, heads, pipeline, devices, batch,
micro-batch, virtual stages; seconds with full recomputation; seconds, MFU and HFU (in per cent) with sequence
parallelism and selective recomputation. The tensor-parallel degree is 8."""

LLAMA_4 = (
    (8192, 8, 1, 16, 64, 8192, 32, 430, 43),
    (16384, 8, 1, 16, 128, 8192, 16, 400, 41),
    (16384, 8, 16, 16, 8, 131072, 16, 380, 38),
)
"""Llama 3 (arXiv 2407.21783), table 4: devices, tensor, context, pipeline, data, tokens per sequence, batch per
replica, TFLOP/s per device, MFU in per cent."""


def papers() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    return {
        "Megatron SC21, table 1": [_weak_scaling(*row) for row in MEGATRON_1],
        "Megatron SC21, table 2, PTD-P": [_scheme(*row) for row in MEGATRON_2 if row[0] == "ptdp"],
        "Megatron SC21, table 2, ZeRO-3": [_scheme(*row) for row in MEGATRON_2 if row[0] == "zero3"],
        "Korthikanti, table 5": [row for given in KORTHIKANTI_5 for row in _both(*given)],
        "Llama 3, table 4": [_llama(*row) for row in LLAMA_4],
    }


def gpt(layers: int, hidden: int, heads: int) -> Transformer:
    """Return Megatron's GPT with a vocabulary of 51,200 and sequences of 2,048 tokens."""
    return Transformer(
        name=f"gpt-{layers}x{hidden}", layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq=SEQ
    )


def llama(name: str, seq: int) -> Transformer:
    """Return the Llama 3.1 model with this name (Llama 3 herd, arXiv 2407.21783, table 3)."""
    return Transformer(
        name=name, **LLAMA[name], kv_heads=8, vocab=128256, seq=seq, gated=True, tied=False, positions="rotary",
        norm="rmsnorm", bias=False,
    )  # fmt: skip


def _row(
    dataset: str,
    model: Transformer,
    devices: int,
    layout: Layout,
    seconds: float,
    *,
    software: str = "megatron-core",
) -> Row:
    machine = cluster(A100_80, devices, intra=NVLINK3, inter=SELENE)
    return published_row(dataset, model, machine, layout, seconds, software=software)


def _weak_scaling(
    _billions: float, heads: int, hidden: int, layers: int, tensor: int, pipeline: int, devices: int, batch: int,
    tflops: int, *_: float,
) -> Row:  # fmt: skip
    each, in_pipelines = layers // pipeline, 1 if heads // tensor % 4 == 0 else 2
    virtual = 1 if pipeline == 1 else next((v for v in (2, 3) if each % v == 0), 1)
    layout = Layout(
        data=devices // (tensor * pipeline), tensor=tensor, pipeline=pipeline, global_batch=batch,
        micro_batch=4 if pipeline == 1 else in_pipelines, recompute="full",
        schedule="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual,
        precision="fp16-mixed", flash_attention=False,
    )  # fmt: skip
    seconds = float(megatron_flops(batch, SEQ, layers, hidden, VOCAB)) / (devices * tflops * 1e12)
    return _row("Megatron SC21, table 1", gpt(layers, hidden, heads), devices, layout, seconds)


def _scheme(
    scheme: str, billions: float, batch: int, devices: int, micro: int, tflops: int, _days: int
) -> Row:
    layers, hidden, heads, tensor, pipeline = MEGATRON_SIZES[billions]
    if scheme == "zero3":
        layout = Layout(data=devices, zero=3, global_batch=batch, micro_batch=micro, recompute="full")
    else:
        layout = Layout(
            data=devices // (tensor * pipeline), tensor=tensor, pipeline=pipeline, global_batch=batch, recompute="full",
            schedule="interleaved", virtual_stages=3 if layers == 105 else 2,
        )  # fmt: skip
    layout = layout.replace(precision="fp16-mixed", flash_attention=False)
    seconds = float(megatron_flops(batch, SEQ, layers, hidden, VOCAB)) / (devices * tflops * 1e12)
    software = "deepspeed-0.5" if scheme == "zero3" else "megatron-core"
    return _row(
        "Megatron SC21, table 2", gpt(layers, hidden, heads), devices, layout, seconds, software=software
    )


def _both(
    _name: str, layers: int, hidden: int, heads: int, pipeline: int, devices: int, batch: int, micro: int, virtual: int,
    full_s: float, selective_s: float, *_: float,
) -> list[Row]:  # fmt: skip
    def run(recompute: Recompute, seconds: float) -> Row:
        layout = Layout(
            data=devices // (8 * pipeline), tensor=8, pipeline=pipeline, global_batch=batch, micro_batch=micro,
            schedule="interleaved" if virtual > 1 else "1f1b", virtual_stages=virtual, recompute=recompute,
            sequence_parallel=recompute == "selective", precision="fp16-mixed", flash_attention=False,
        )  # fmt: skip
        return _row("Korthikanti, table 5", gpt(layers, hidden, heads), devices, layout, seconds)

    return [run("full", full_s), run("selective", selective_s)]


def _llama(
    devices: int,
    tensor: int,
    context: int,
    pipeline: int,
    data: int,
    seq: int,
    batch: int,
    tflops: int,
    _mfu: int,
) -> Row:
    model = llama("llama3.1-405B", seq)
    layout = Layout(
        data=data, tensor=tensor, pipeline=pipeline, context=context, zero=1, global_batch=data * batch,
        schedule="interleaved", virtual_stages=4, sequence_parallel=True, precision="bf16-mixed",
    )  # fmt: skip
    halved = (
        sum(float(p.flops) for p in attention_core(model, Split.of())) * model.layers * 1.5 * data * batch
    )
    seconds = (float(model_flops(model, data * batch)) - halved) / (devices * tflops * 1e12)
    machine = cluster(H100, devices, intra=NVLINK4, inter=META)
    return Row("Llama 3, table 4", model, machine, layout, seconds, {"devices": devices, "seq": seq})
