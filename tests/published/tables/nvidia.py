"""Step times that NVIDIA publishes for Megatron-Core: NeMo on A100, H100, B200 and GB200, and Megatron Bridge.

Each source states degrees, micro-batch, batch and sequence. Clusters are DGX SuperPODs. Recomputation, sequence
parallelism, the distributed optimizer (ZeRO 1) and the schedule are those of the recipes in the same repository and
release. The NVL72 systems are used in groups of 64 devices, because all runs have a power of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from published.rows import published_row
from published.tables.papers import llama
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

NEMO_2022 = {1: 40345, 2: 79815, 4: 161754, 8: 312774, 16: 659481, 32: 1159288}
"""NVIDIA/NeMo-Framework-Launcher@f84f0a2c README.md, section 7.1.2: tokens per second of a GPT with 5 billion
parameters, by nodes of 8 A100. The layout is that of conf/training/gpt3/5b.yaml in the same commit, with 2,048
sequences in a batch. The rates of 175 billion parameters are left out: they are a third below those of the release
before, without a word on recomputation."""

NEMO_H100 = {
    "llama3.1-8B": {
        "bf16-mixed": {8: 12.91, 16: 13.00, 32: 13.05, 64: 13.08, 128: 13.10},
        "fp8-mixed": {8: 9.67, 16: 9.73, 32: 9.75, 64: 9.80, 128: 9.82},
    },
    "llama3.1-70B": {
        "bf16-mixed": {64: 14.72, 128: 14.73, 256: 14.8, 512: 14.89, 1024: 14.92, 2048: 14.98},
        "fp8-mixed": {64: 11.01, 128: 10.93, 256: 11.16, 512: 11.18, 1024: 11.28, 2048: 11.39},
    },
    "llama3.1-405B": {
        "bf16-mixed": {32: 8.85, 96: 8.75, 192: 16.93, 576: 17.20, 1152: 17.52, 2304: 17.62},
        "fp8-mixed": {32: 5.80, 96: 5.71, 192: 11.00, 576: 11.24, 1152: 11.31, 2304: 12.35},
    },
    "nemotron-15B": {
        "bf16-mixed": {16: 2.83, 32: 2.86, 64: 2.86, 128: 2.89, 256: 2.88, 512: 2.92, 1024: 2.92, 2048: 2.96},
        "fp8-mixed": {16: 2.08, 32: 2.07, 64: 2.09, 128: 2.08, 256: 2.1, 512: 2.12, 1024: 2.12, 2048: 2.18},
    },
    "nemotron-340B": {
        "bf16-mixed": {128: 4.61, 256: 4.67, 512: 4.7, 1024: 4.73, 2048: 4.84},
        "fp8-mixed": {128: 3.16, 256: 3.21, 512: 3.26, 1024: 3.34, 2048: 3.49},
    },
    "gpt3-175B": {
        "bf16-mixed": {128: 8.91, 256: 8.95, 512: 9.09, 1024: 9.01, 2048: 9.02},
        "fp8-mixed": {128: 5.92, 256: 5.96, 512: 6.44, 1024: 6.72, 2048: 6.24},
    },
}
"""NVIDIA/dgxc-benchmarking, tag v24.11.1 (NeMo 24.09 and 24.11): seconds by model, precision and number of H100. Llama
3.1 405B has fewer layers on fewer than 576 devices."""

NEMO_H100_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "llama3.1-8B": {"context": 2, "num_micro_batches": 32},
    "llama3.1-70B": {
        "tensor": 4, "pipeline": 4, "context": 2, "virtual_stages": 5, "num_micro_batches": 64,
    },
    "llama3.1-405B": {
        "tensor": 8, "pipeline": 9, "context": 2, "virtual_stages": 7, "num_micro_batches": 63,
    },
    "nemotron-15B": {"tensor": 4, "micro_batch": 4, "num_micro_batches": 4},
    "nemotron-340B": {
        "tensor": 8, "pipeline": 8, "virtual_stages": 12, "num_micro_batches": 16, "recompute": "selective",
    },
    "gpt3-175B": {"tensor": 4, "pipeline": 8, "virtual_stages": 12, "num_micro_batches": 64},
}  # fmt: skip
LLAMA_405B_PARTS = {32: (7, 1), 96: (21, 3), 192: (42, 3)}
"""Layers and pipeline stages of Llama 3.1 405B by number of devices, below 576."""

NEMO_GB200 = {
    "nemotron-340B": {
        "bf16-mixed": {
            (128, 32): 2.189, (256, 64): 2.19, (512, 128): 2.229,
            (128, 512): 32.66, (256, 512): 16.58, (512, 512): 8.468,
        },
        "fp8-mixed": {
            (128, 32): 1.483, (256, 64): 1.517, (512, 128): 1.549,
            (128, 512): 21.83, (256, 512): 11.21, (512, 512): 5.668,
        },
    },
    "llama3.1-405B": {
        "bf16-mixed": {(128, 64): 9.347, (256, 128): 9.484, (512, 256): 9.508},
        "fp8-mixed": {(128, 64): 6.131, (256, 128): 6.183, (512, 256): 6.244},
    },
}  # fmt: skip
"""NVIDIA/dgxc-benchmarking, tag v25.05 (NeMo 25.02): seconds by model, precision, number of GB200 and batch."""

NEMO_GB200_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "nemotron-340B": {"tensor": 8, "pipeline": 4, "virtual_stages": 12},
    "llama3.1-405B": {"tensor": 4, "pipeline": 8, "context": 2, "virtual_stages": 8},
}

BRIDGE = (
    ("25.09", "h100-80gb", "llama3.1-8B", 8, 128, 1, 3, 1, 1, 1, 1, 14079),
    ("25.09", "h100-80gb", "llama3.1-70B", 64, 128, 1, 1, 4, 8, 1, 5, 1619),
    ("25.09", "h100-80gb", "llama3.1-405B", 1024, 512, 1, 1, 8, 8, 2, 8, 302),
    ("25.11", "h100-80gb", "llama3.1-8B", 8, 128, 1, 3, 1, 1, 1, 1, 14451),
    ("25.11", "h100-80gb", "llama3.1-70B", 64, 128, 1, 1, 4, 8, 1, 5, 1602),
    ("25.11", "h100-80gb", "llama3.1-405B", 1024, 512, 1, 1, 8, 8, 2, 8, 292),
    ("26.02", "h100-80gb", "llama3.1-70B", 64, 256, 1, 1, 4, 8, 1, 5, 1621),
    ("26.02", "h100-80gb", "llama3.1-405B", 1024, 1536, 1, 1, 8, 8, 2, 8, 311),
    ("25.09", "b200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 29994),
    ("25.09", "b200", "llama3.1-405B", 128, 64, 1, 1, 4, 8, 2, 8, 664),
    ("25.11", "b200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 30624),
    ("25.11", "b200", "llama3.1-405B", 128, 64, 1, 1, 4, 8, 2, 8, 661),
    ("25.09", "gb200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 31357),
    ("25.09", "gb200", "llama3.1-70B", 64, 128, 2, 3, 1, 1, 1, 1, 3986),
    ("25.09", "gb200", "llama3.1-405B", 128, 64, 1, 3, 2, 1, 1, 1, 729),
    ("25.11", "gb200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 31508),
    ("25.11", "gb200", "llama3.1-70B", 64, 256, 2, 3, 1, 1, 1, 1, 4312),
    ("25.11", "gb200", "llama3.1-405B", 256, 1536, 1, 1, 4, 16, 1, 4, 813),
    ("26.02", "gb200", "llama3.1-70B", 64, 256, 2, 3, 1, 1, 1, 1, 4040),
    ("26.02", "gb200", "llama3.1-405B", 256, 1536, 1, 1, 4, 16, 1, 4, 793),
)
"""NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md@0a25f91: release, device, model, devices, batch,
micro-batch, ZeRO stage (3 where it says FSDP), tensor, pipeline, context, virtual stages, tokens per second and device.
FP8 with one scale per tensor, 8,192 tokens per sequence; dense models only."""

NEMO_FP8 = (
    ("25.02", "b200", "gpt3-175B", 512, 2048, 2, 1, 4, 4, 1, 6, 1600),
    ("25.02", "b200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 26006),
    ("25.02", "b200", "llama3.1-70B", 64, 128, 1, 1, 2, 4, 2, 5, 3062),
    ("25.02", "b200", "llama3.1-405B", 128, 64, 1, 1, 4, 8, 2, 8, 625),
    ("25.02", "b200", "nemotron-15B", 64, 256, 2, 1, 1, 1, 1, 1, 14760),
    ("25.02", "b200", "nemotron-340B", 128, 32, 1, 1, 8, 4, 1, 12, 602),
    ("25.04", "gb200", "gpt3-175B", 128, 256, 2, 1, 4, 4, 1, 12, 1804),
    ("25.04", "gb200", "llama3.1-8B", 8, 128, 2, 1, 1, 1, 1, 1, 33099),
    ("25.04", "gb200", "llama3.1-70B", 64, 128, 1, 3, 1, 1, 1, 1, 4035),
    ("25.04", "gb200", "llama3.1-405B", 128, 64, 1, 1, 4, 8, 2, 8, 665),
    ("25.04", "gb200", "nemotron-15B", 64, 256, 2, 1, 1, 1, 1, 1, 17809),
    ("25.04", "gb200", "nemotron-340B", 128, 32, 1, 1, 8, 4, 1, 12, 737),
)
"""docs.nvidia.com/nemo-framework/user-guide, performance/performance_summary.html as it was with NeMo 25.02 (it changes
with each release; today's copies have later figures) and performance/archive/25.04-performance-summary.html,
"Pre-training": columns as in `BRIDGE`, with sequences of the models' lengths in `_model`. Dense models only."""


def nvidia() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    gpt = [_gpt(nodes, rate) for nodes, rate in NEMO_2022.items()]
    h100 = [
        _h100(name, precision, devices, seconds)
        for name, by_precision in NEMO_H100.items()
        for precision, times in by_precision.items()
        for devices, seconds in times.items()
    ]
    gb200 = [
        _gb200(name, precision, devices, batch, seconds)
        for name, by_precision in NEMO_GB200.items()
        for precision, times in by_precision.items()
        for (devices, batch), seconds in times.items()
    ]
    found = {"NeMo 22.09, A100": gpt, "NeMo 24.11, H100": h100, "NeMo 25.02, GB200": gb200}
    for device, label in (("h100-80gb", "H100"), ("b200", "B200"), ("gb200", "GB200")):
        found[f"Megatron Bridge, {label}"] = [_fp8(*row) for row in BRIDGE if row[1] == device]
    found["NeMo 25.02, B200"] = [_fp8(*row, software="nemo") for row in NEMO_FP8 if row[0] == "25.02"]
    found["NeMo 25.04, GB200"] = [_fp8(*row, software="nemo") for row in NEMO_FP8 if row[0] == "25.04"]
    return found


def _gpt(nodes: int, rate: float) -> Row:
    model = Transformer(name="gpt-5B", layers=24, hidden=4096, heads=32, vocab=50304, seq=2048)
    layout = Layout(data=8 * nodes, micro_batch=2, zero=1, global_batch=2048, flash_attention=False)
    return _row("NeMo 22.09, A100", model, Cluster.of("a100-80gb", nodes=nodes), layout, 2048 * 2048 / rate)


def _h100(name: str, precision: str, devices: int, seconds: float) -> Row:
    given = dict(NEMO_H100_LAYOUTS[name])
    model = _model(name)
    if name == "llama3.1-405B":
        # The yaml file of this recipe has 16 groups of queries; Llama has 8.
        layers, given["pipeline"] = LLAMA_405B_PARTS.get(devices, (126, 9))
        model = model.replace(name=f"{name}, {layers} layers", layers=layers, kv_heads=16)
    layout = _layout(devices, precision, **given)
    return _row("NeMo 24.11, H100", model, Cluster.of("h100-80gb", nodes=devices // 8), layout, seconds)


def _gb200(name: str, precision: str, devices: int, batch: int, seconds: float) -> Row:
    layout = _layout(devices, precision, global_batch=batch, **NEMO_GB200_LAYOUTS[name])
    return _row("NeMo 25.02, GB200", _model(name), _nvl72(devices), layout, seconds)


def _fp8(
    release: str, device: str, name: str, devices: int, batch: int, micro_batch: int, zero: int, tensor: int,
    pipeline: int, context: int, virtual: int, rate: float, *, software: str = "megatron-bridge",
) -> Row:  # fmt: skip
    label = {"h100-80gb": "H100"}.get(device, device.upper())
    table = f"Megatron Bridge, {label}" if software == "megatron-bridge" else f"NeMo {release}, {label}"
    return megatron_row(
        table, name, device, devices, batch * _model(name).seq / (rate * devices), software=software, release=release,
        precision="fp8-mixed", global_batch=batch, micro_batch=micro_batch, zero=zero, tensor=tensor,
        pipeline=pipeline, context=context, virtual_stages=virtual,
    )  # fmt: skip


def megatron_row(
    table: str, name: str, device: str, devices: int, seconds: float, *, software: str, release: str, precision: str,
    **layout: Any,
) -> Row:  # fmt: skip
    """Return the row of a run of one of NVIDIA's models on whole nodes of NVIDIA's reference systems.

    Args:
        table: Name of the table.
        name: Name of the model.
        device: Name of the device.
        devices: Number of devices.
        seconds: Measured step time.
        software: The software that ran it.
        release: What else distinguishes the run: a release, or who ran it.
        precision: The layout's precision.
        **layout: The layout's degrees, batch and micro-batch.
    """
    where = _nvl72(devices) if device == "gb200" else Cluster.of(device, nodes=devices // 8)
    made = _layout(devices, precision, **layout)
    return published_row(table, _model(name), where, made, seconds, software=software, release=release)


_row = partial(published_row, software="nemo")


def _nvl72(devices: int) -> Cluster:
    return Cluster.of("gb200", nodes=-(-devices // 64), per_node=min(64, devices))


def _layout(
    devices: int, precision: str, *, tensor: int = 1, pipeline: int = 1, context: int = 1, virtual_stages: int = 1,
    micro_batch: int = 1, num_micro_batches: int = 0, global_batch: int = 0, zero: int = 1, recompute: str = "none",
) -> Layout:  # fmt: skip
    data = devices // (tensor * pipeline * context)
    virtual = virtual_stages if pipeline > 1 else 1
    return Layout.model_validate(
        {
            "data": data, "tensor": tensor, "pipeline": pipeline, "context": context, "zero": zero,
            "global_batch": global_batch or data * micro_batch * num_micro_batches, "micro_batch": micro_batch,
            "virtual_stages": virtual, "schedule": "interleaved" if virtual > 1 else "1f1b",
            "sequence_parallel": tensor > 1, "precision": precision, "recompute": recompute,
        }
    )  # fmt: skip


def _model(name: str) -> Transformer:
    if name.startswith("llama"):
        return llama(name, 8192)
    if name == "gpt3-175B":
        return Transformer(name=name, layers=96, hidden=12288, heads=96, vocab=51200, seq=2048)
    layers, hidden, heads = (32, 6144, 48) if name == "nemotron-15B" else (96, 18432, 96)
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, vocab=256000, seq=4096, tied=False,
        positions="rotary", bias=False,
    )  # fmt: skip
