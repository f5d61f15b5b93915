"""Published step times of parameters that are sharded over replicas: FSDP of IBM and torchtitan, DeepSpeed's ZeRO 3.

Where a source gives a rate in FLOP/s, it counts the model's FLOPs, without recomputation. torchtitan does not name the
network of its 64 A100; 200 Gbit/s a device are assumed. Runs that recompute every other layer are left out.
"""

from __future__ import annotations

from published.rows import published_row
from published.tables.machines import A100_80, H100, NVLINK3, NVLINK4, cluster, network
from published.tables.papers import llama
from shardscope.analytic.compute.flops import model_flops
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

LLAMA_2 = {
    "7B": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
    "13B": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
    "34B": {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016},
    "70B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
}
IBM = (
    ("7B", True, "none", 2, 3700, 7500),
    ("13B", True, "none", 1, 1700, 3700),
    ("34B", False, "full", 2, 700, 1550),
    ("34B", False, "full", 8, 772, 1700),
    ("70B", False, "full", 2, 370, 800),
    ("70B", False, "full", 6, 380, 850),
)
"""foundation-model-stack/fms-fsdp README.md@6dc80d2 and @4ffb9bd (February and March 2024, without torch.compile, with
FlashAttention-2): model, whether shards are replicated by node (HSDP), recomputation, micro-batch; tokens per second
and device on 128 A100 with 400 Gbit/s a node, and on 96 H100 with 800 Gbit/s a node."""

TORCHTITAN_A100 = (
    ("llama3-8B", "selective", 1, 2973),
    ("llama3-70B", "full", 1, 331),
    ("llama2-13B", "none", 2, 2162),
    ("llama2-13B", "selective", 2, 1904),
    ("llama2-70B", "selective", 1, 355),
    ("llama2-70B", "full", 2, 353),
)
"""pytorch/torchtitan docs/performance.md@0413364: model, recomputation, micro-batch, tokens per second and device on 64
A100 with FSDP2."""

ROBERTA = {"10B": (127, 2560, 40), "52B": (64, 8192, 64)}
"""Layers, hidden and heads. The source states parameters only; these are Amazon's usual shapes of that size."""
ROBERTA_ZERO_3 = (("10B", 64, 54.86, 92.07), ("52B", 64, 67.61, 116.06), ("52B", 256, None, 108))
"""deepspeedai/DeepSpeed pull request 1453 (October 2021): model, number of A100-40GB in nodes of 8 with 400 Gbit/s,
TFLOP/s per device before and after the change, which overlaps collectives with computation. 16 sequences of 512 tokens
a device, every layer recomputed, bf16."""


def sharded() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    return {
        "FSDP of IBM, A100": [_ibm(*row[:4], row[4], old=True) for row in IBM],
        "FSDP of IBM, H100": [_ibm(*row[:4], row[5], old=False) for row in IBM],
        "torchtitan, A100": [_torchtitan(*row) for row in TORCHTITAN_A100],
        "DeepSpeed 0.5.4, A100": [_roberta(*row[:2], row[2]) for row in ROBERTA_ZERO_3 if row[2]],
        "DeepSpeed 0.5.9, A100": [_roberta(*row[:2], row[3], is_new=True) for row in ROBERTA_ZERO_3],
    }


def llama_2(size: str) -> Transformer:
    """Return Llama 2 of this size (34B is Code Llama's) with sequences of 4,096 tokens."""
    return Transformer(
        name=f"llama-2-{size}", **LLAMA_2[size], vocab=32000, seq=4096, gated=True, tied=False, positions="rotary",
        norm="rmsnorm", bias=False,
    )  # fmt: skip


def _ibm(size: str, is_hybrid: bool, recompute: str, micro_batch: int, rate: float, *, old: bool) -> Row:
    devices = 128 if old else 96
    where = (
        cluster(A100_80, devices, intra=NVLINK3, inter=network(50, "IBM: 400 Gbit/s per node"))
        if old
        else cluster(H100, devices, intra=NVLINK4, inter=network(100, "IBM: 800 Gbit/s per node"))
    )
    layout = _zero_3(devices, micro_batch, recompute).replace(shard=8 if is_hybrid else 0)
    name = f"FSDP of IBM, {'A100' if old else 'H100'}"
    seconds = micro_batch * 4096 / rate
    return published_row(name, llama_2(size), where, layout, seconds, software="fsdp2-2.10")


def _torchtitan(name: str, recompute: str, micro_batch: int, rate: float) -> Row:
    family, size = name.split("-")
    model = llama_2(size) if family == "llama2" else llama(f"llama3.1-{size}", 8192)
    where = cluster(A100_80, 64, intra=NVLINK3, inter=network(200, "assumed"))
    layout, seconds = _zero_3(64, micro_batch, recompute), micro_batch * model.seq / rate
    return published_row("torchtitan, A100", model, where, layout, seconds, software="torchtitan")


def _roberta(size: str, devices: int, tflops: float | None, *, is_new: bool = False) -> Row:
    assert tflops is not None
    layers, hidden, heads = ROBERTA[size]
    model = Transformer(
        name=f"roberta-{size}", layers=layers, hidden=hidden, heads=heads, vocab=53248, seq=512
    )
    where = cluster(
        Device.of("a100-40gb"), devices, intra=NVLINK3, inter=network(50, "p4d: 400 Gbit/s per node")
    )
    layout = _zero_3(devices, 16, "full").replace(flash_attention=False)
    seconds = float(model_flops(model, layout.global_batch)) / (devices * tflops * 1e12)
    name = f"DeepSpeed 0.5.{9 if is_new else 4}, A100"
    software = "deepspeed" if is_new else "deepspeed-0.5"
    return published_row(name, model, where, layout, seconds, software=software)


def _zero_3(replicas: int, micro_batch: int, recompute: str) -> Layout:
    return Layout.model_validate(
        {
            "data": replicas, "zero": 3, "global_batch": replicas * micro_batch, "micro_batch": micro_batch,
            "recompute": recompute,
        }
    )  # fmt: skip
