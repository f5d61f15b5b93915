"""Peaks of Megatron-LM on B200 by SimuMax, of torchtitan on H100 and H200, and of Mist on L4.

SimuMax (MooreThreads/SimuMax, docs/b200, release 1.2): bf16, micro-batches of one sequence, no recomputation,
distributed optimizer, fused cross entropy; the peak of allocated tensors. torchtitan (pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md and llama3-8b_h200_202506_trainy-whitefiber.md): what the allocator
reserved. Pipelines have as many micro-batches as stages, which was the default (``pipeline_parallel_microbatches``).
Mist (Dazz993/Mist, benchmark/mist/tuned_configs/l4-24gb): runs that recompute and offload nothing. Its runtime is its
own; as DeepSpeed's, it keeps 16-bit gradients. The first stage has one layer more than in the equal split that is
predicted.

Sailor (eth-easl/sailor) publishes peaks too, but neither their precision nor what they count; of two runs that differ
only in the number of replicas, one takes 8 GiB more.
"""

from __future__ import annotations

from published.memory.rows import MemoryRow
from published.tables.papers import llama
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import LatentAttention, Mixture, Transformer

SIMUMAX = (
    ("llama3-70b", 12, 2, 1, 4, 1, 1, 4096, 4, 60.68),
    ("llama3-70b", 12, 4, 1, 2, 1, 1, 4096, 4, 39.07),
    ("llama3-70b", 12, 4, 1, 2, 1, 1, 4096, 8, 39.07),
    ("llama3-70b", 12, 2, 1, 4, 1, 1, 4096, 32, 60.68),
    ("deepseek-v2", 4, 1, 2, 4, 4, 1, 4096, 32, 44.70),
    ("llama3-405b", 4, 4, 1, 2, 1, 1, 4096, 4, 52.89),
    ("llama3-405b", 4, 2, 1, 4, 1, 1, 4096, 8, 81.59),
    ("llama3-405b", 4, 4, 1, 2, 1, 1, 4096, 8, 52.89),
    ("llama3-405b", 4, 1, 2, 4, 1, 1, 4096, 32, 87.08),
    ("llama3-405b", 4, 2, 1, 4, 1, 1, 4096, 32, 81.59),
    ("llama3-70b", 12, 2, 1, 1, 1, 4, 131072, 4, 112.67),
)
"""Model, layers, tensor, pipeline, data, expert and context degrees, tokens per sequence, micro-batches, GiB."""

TORCHTITAN = (
    ("8B", "h100-96gb", 8, 1, 1, 1, 2, "selective", 8192, "bf16-mixed", False, "torchtitan-2024", 77.0),
    ("8B", "h100-96gb", 8, 1, 1, 1, 1, "full", 32768, "fp8-mixed", False, "torchtitan-2024", 83.9),
    ("8B", "h100-96gb", 128, 1, 1, 1, 2, "selective", 8192, "bf16-mixed", False, "torchtitan-2024", 62.0),
    ("405B", "h100-96gb", 8, 8, 8, 1, 4, "full", 8192, "fp8-mixed", False, "torchtitan-2024", 82.5),
    ("405B", "h100-96gb", 8, 8, 8, 1, 4, "full", 8192, "fp8-mixed", True, "torchtitan-2024", 72.7),
    ("405B", "h100-96gb", 4, 8, 8, 2, 1, "full", 65536, "fp8-mixed", False, "torchtitan-2024", 75.9),
    ("8B", "h200", 32, 1, 1, 1, 2, "selective", 8192, "fp8-mixed", False, "", 47.96),
    ("8B", "h200", 64, 1, 1, 1, 2, "selective", 8192, "fp8-mixed", False, "", 46.97),
)
"""Llama 3.1, device, data, tensor, pipeline, context, micro-batch, recomputation, tokens per sequence, precision,
whether the pipeline is interleaved, memory model of the release if it differs from today's, GiB."""

MIST = (
    ("gpt2-2.7b", 2560, 10240, 32, 32, False, 1, 2, 2, 64, 19607),
    ("llama-1.3b", 2048, 5632, 24, 16, True, 2, 1, 2, 32, 18678),
    ("llama-2.7b", 2560, 6912, 32, 32, True, 1, 2, 2, 64, 19821),
)
"""Model, hidden, inner width, layers, heads, whether it is gated, micro-batch, data, pipeline, batch, MiB."""

_LLAMA = {
    "llama3-70b": {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "llama3-405b": {"hidden": 16384, "heads": 128, "kv_heads": 16, "ffn": 53248, "vocab": 128256},
}


def simumax() -> list[MemoryRow]:
    """Return the rows of `SIMUMAX`."""
    return [_simumax(*row) for row in SIMUMAX]


def _simumax(
    name: str, layers: int, tensor: int, pipeline: int, data: int, expert: int, context: int, seq: int, count: int,
    gib: float,
) -> MemoryRow:  # fmt: skip
    common = {
        "name": f"{name}-l{layers}", "layers": layers, "seq": seq, "gated": True, "tied": False, "positions": "rotary",
        "norm": "rmsnorm", "bias": False, "head_size": 128,
    }  # fmt: skip
    if name in _LLAMA:
        model = Transformer.model_validate(common | _LLAMA[name])
    else:
        model = Transformer.model_validate(
            common | {"hidden": 5120, "heads": 128, "ffn": 12288, "vocab": 102400}
            | {"mixture": Mixture(experts=160, active=6, ffn=1536, shared_ffn=3072, dense_layers=1)}
            | {"latent": LatentAttention(query_rank=1536, kv_rank=512, rope_size=64, nope_size=128, value_size=128)}
        )  # fmt: skip
    layout = Layout(
        data=data, tensor=tensor, pipeline=pipeline, context=context, expert=expert, zero=1,
        global_batch=count * data, sequence_parallel=tensor > 1,
    )  # fmt: skip
    where = Cluster.of("b200", nodes=1, per_node=8)
    return MemoryRow("Megatron-LM, B200", model, where, layout, "megatron-core", gib, is_fitted=True)


def torchtitan() -> list[MemoryRow]:
    """Return the rows of `TORCHTITAN`."""
    return [_torchtitan(*row) for row in TORCHTITAN]


def _torchtitan(
    size: str, device: str, data: int, tensor: int, pipeline: int, context: int, micro: int, recompute: str, seq: int,
    precision: str, is_interleaved: bool, release: str, gib: float,
) -> MemoryRow:  # fmt: skip
    layout = Layout.model_validate(
        {
            "data": data, "tensor": tensor, "pipeline": pipeline, "context": context, "zero": 2 if pipeline > 1 else 3,
            "micro_batch": micro, "global_batch": data * micro * pipeline, "recompute": recompute,
            "precision": precision, "sequence_parallel": tensor > 1,
            "schedule": "interleaved" if is_interleaved else "1f1b", "virtual_stages": 1 + is_interleaved,
        }
    )  # fmt: skip
    where = Cluster.of(device, nodes=layout.num_devices // 8)
    name = "torchtitan, H200" if device == "h200" else "torchtitan, H100"
    model = llama(f"llama3.1-{size}", seq)
    return MemoryRow(name, model, where, layout, "torchtitan", gib, "reserved", memory=release)


def mist() -> list[MemoryRow]:
    """Return the rows of `MIST`."""
    return [_mist(*row) for row in MIST]


def _mist(
    name: str, hidden: int, inner: int, layers: int, heads: int, is_gated: bool, micro: int, data: int, pipeline: int,
    batch: int, mib: int,
) -> MemoryRow:  # fmt: skip
    model = Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, ffn=inner, vocab=50304, seq=2048, gated=is_gated,
        tied=False,
    )  # fmt: skip
    layout = Layout(
        data=data, pipeline=pipeline, global_batch=batch, micro_batch=micro, zero=1, precision="fp16-mixed"
    )
    where = Cluster.of("l4", nodes=1, per_node=data * pipeline)
    return MemoryRow("Mist, L4", model, where, layout, "megatron-core", mib / 1024, memory="deepspeed")
