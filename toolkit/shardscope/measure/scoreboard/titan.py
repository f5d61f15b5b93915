"""torchtitan's measured throughput of Llama 3.1 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).

H100 with 96 GB of HBM2e and a power cap of 500 W, so that its true peak is below the 989 TFLOP/s assumed here. No
calibration was fitted to these rows: they show how well one transfers to other software and a capped device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardscope.measure.scoreboard.machines import H100_HBM2E, NVLINK4, cluster, network
from shardscope.measure.scoreboard.rows import Row
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

INPUTS = ("model", "gpus", "technique", "local_batch", "ac", "seq")
NETWORK = network(400, "torchtitan: 400 Gbit/s RDMA a device")
LLAMA: Mapping[str, Mapping[str, int]] = {
    "llama3.1-8B": {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32},
    "llama3.1-70B": {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64},
    "llama3.1-405B": {"layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128},
}


def rows(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows of the tables."""
    columns = block["columns"]
    return [_row(dict(zip(columns, values, strict=True)), dataset) for values in block["rows"]]


def llama(name: str, seq: int) -> Transformer:
    """The Llama 3.1 model of this name (Llama 3 herd, arXiv 2407.21783, table 3)."""
    return Transformer(
        name=name, **LLAMA[name], kv_heads=8, vocab=128256, seq=seq, gated=True, tied=False, positions="rotary",
        norm="rmsnorm", bias=False,
    )  # fmt: skip


def _row(cells: Mapping[str, Any], dataset: str) -> Row:
    technique = cells["technique"]
    degree = {name: _degree(technique, name) for name in ("TP", "PP", "CP")}
    data = cells["gpus"] // (degree["TP"] * degree["PP"] * degree["CP"])
    batch = cells["local_batch"] * data
    interleaved = "interleaved" in technique
    return Row(
        dataset=dataset,
        model=llama(cells["model"], cells["seq"]),
        cluster=cluster(H100_HBM2E, cells["gpus"], intra=NVLINK4, inter=NETWORK),
        layout=Layout(
            data=data, tensor=degree["TP"], pipeline=degree["PP"], context=degree["CP"], global_batch=batch,
            micro_batch=1 if degree["PP"] > 1 else cells["local_batch"], zero=2 if degree["PP"] > 1 else 3,
            schedule="interleaved" if interleaved else "1f1b", virtual_stages=2 if interleaved else 1,
            recompute=cells["ac"] if cells["ac"] in {"full", "selective"} else "none",
            sequence_parallel=degree["TP"] > 1,
            precision="bf16-mixed" if "8B" in cells["model"] and "fp8" not in technique.lower() else "fp8-mixed",
        ),
        seconds=batch * cells["seq"] / (cells["tps_per_gpu"] * cells["gpus"]),
        inputs={name: cells[name] for name in INPUTS},
    )  # fmt: skip


def _degree(technique: str, axis: str) -> int:
    found = re.search(rf"{axis}(\d+)", technique)
    return int(found[1]) if found else 1
