"""torchtitan's measured throughput of Llama 3.1 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).

H100 with 96 GB of HBM2e and a power cap of 500 W, so that its true peak is below the 989 TFLOP/s assumed here. No
calibration was fitted to these rows: they show how well one transfers to other software and a capped device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from published.tables.machines import NVLINK4, cluster, network
from published.tables.papers import llama
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout

INPUTS = ("model", "gpus", "technique", "local_batch", "ac", "seq")
NETWORK = network(400, "torchtitan: 400 Gbit/s RDMA a device")


def rows(block: Mapping[str, Any], dataset: str) -> list[Row]:
    """The rows of the tables."""
    columns = block["columns"]
    return [_row(dict(zip(columns, values, strict=True)), dataset) for values in block["rows"]]


def _row(cells: Mapping[str, Any], dataset: str) -> Row:
    technique = cells["technique"]
    degree = {name: _degree(technique, name) for name in ("TP", "PP", "CP")}
    data = cells["gpus"] // (degree["TP"] * degree["PP"] * degree["CP"])
    batch = cells["local_batch"] * data
    interleaved = "interleaved" in technique
    return Row(
        dataset=dataset,
        model=llama(cells["model"], cells["seq"]),
        cluster=cluster(Device.of("h100-96gb"), cells["gpus"], intra=NVLINK4, inter=NETWORK),
        layout=Layout(
            data=data, tensor=degree["TP"], pipeline=degree["PP"], context=degree["CP"], global_batch=batch,
            micro_batch=cells["local_batch"] // degree["PP"], zero=2 if degree["PP"] > 1 else 3,
            schedule="interleaved" if interleaved else "1f1b", virtual_stages=2 if interleaved else 1,
            recompute=cells["ac"] if cells["ac"] in {"full", "selective"} else "none",
            sequence_parallel=degree["TP"] > 1,
            precision="bf16-mixed" if "8B" in cells["model"] and "fp8" not in technique.lower() else "fp8-mixed",
        ),
        seconds=batch * cells["seq"] / (cells["tps_per_gpu"] * cells["gpus"]),
        inputs={name: cells[name] for name in INPUTS},
        software="torchtitan",
    )  # fmt: skip


def _degree(technique: str, axis: str) -> int:
    found = re.search(rf"{axis}(\d+)", technique)
    return int(found[1]) if found else 1
