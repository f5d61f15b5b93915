"""Step times in the logs of MLPerf Training, rounds 3.0 to 5.0: GPT-3 175B and Llama 3.1 405B with NeMo in FP8.

Each time is the median over the steps of all runs that a submitter logged (``train_step_timing``, ``train_step_time``),
without validation. Degrees, micro-batch and virtual stages are those of the configuration beside the logs: sequence
parallelism, the distributed optimizer (ZeRO 1), no recomputation. Left out are runs without logged steps, other
frameworks (TPU, Gaudi), the one submission on B200 in round 4.1, and round 5.1, whose runs are in FP4, or in FP8 with
attention in FP8.
"""

from __future__ import annotations

from published.tables.nvidia import megatron_row
from shardscope.measure.calibrate.rows import Row

MLPERF = (
    ("3.0", "NVIDIA", "h100-80gb", "gpt3-175B", 512, 2048, 1, 4, 8, 1, 12, 12.0769, 313355),
    ("3.0", "NVIDIA", "h100-80gb", "gpt3-175B", 768, 3072, 1, 4, 8, 1, 12, 12.1261, 468099),
    ("3.0", "CoreWeave", "h100-80gb", "gpt3-175B", 768, 3072, 1, 4, 8, 1, 12, 12.2993, 459882),
    ("3.0", "CoreWeave", "h100-80gb", "gpt3-175B", 1536, 3072, 1, 4, 8, 1, 12, 6.3376, 888460),
    ("3.0", "CoreWeave", "h100-80gb", "gpt3-175B", 3584, 2688, 1, 4, 8, 1, 12, 2.5976, 1846923),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 512, 2048, 1, 4, 8, 1, 12, 11.0520, 345322),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 768, 3072, 1, 4, 8, 1, 12, 11.0751, 516208),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 4096, 2048, 1, 4, 8, 1, 12, 1.6088, 2347972),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 6144, 3072, 1, 4, 8, 1, 12, 1.6153, 3479352),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 8192, 4096, 1, 4, 8, 1, 12, 1.6193, 4483626),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 10240, 2560, 1, 4, 8, 1, 12, 0.9256, 4937654),
    ("3.1", "NVIDIA", "h100-80gb", "gpt3-175B", 10752, 2688, 1, 4, 8, 1, 12, 0.9296, 5152984),
    ("3.1", "Azure", "h100-80gb", "gpt3-175B", 10752, 2688, 1, 4, 8, 1, 12, 0.9473, 5035597),
    ("4.0", "Supermicro", "h100-80gb", "gpt3-175B", 512, 2048, 2, 4, 8, 1, 12, 10.6355, 354097),
    ("4.1", "NVIDIA", "h100-80gb", "gpt3-175B", 256, 2048, 2, 4, 8, 1, 6, 18.3779, 208834),
    ("4.1", "NVIDIA", "h100-80gb", "gpt3-175B", 512, 2048, 2, 4, 8, 1, 6, 9.5004, 404455),
    ("4.1", "Oracle", "h100-80gb", "gpt3-175B", 1536, 3072, 2, 4, 8, 1, 4, 5.1667, 1107153),
    ("4.1", "Oracle", "h100-80gb", "gpt3-175B", 3072, 3072, 2, 4, 8, 1, 4, 3.0643, 1804134),
    ("5.0", "NVIDIA", "h100-80gb", "llama3.1-405B", 512, 1152, 1, 8, 8, 2, 8, 55.1338, 170948),
    ("5.0", "NVIDIA", "h100-80gb", "llama3.1-405B", 2048, 1152, 1, 8, 8, 2, 8, 14.2202, 662123),
    ("5.0", "NVIDIA", "h100-80gb", "llama3.1-405B", 2432, 1216, 1, 8, 8, 2, 8, 12.7287, 774771),
    ("5.0", "NVIDIA", "h100-80gb", "llama3.1-405B", 2560, 1120, 1, 8, 8, 2, 8, 11.1742, 814908),
    ("5.0", "NVIDIA", "h100-80gb", "llama3.1-405B", 8192, 1536, 1, 8, 8, 2, 8, 5.1801, 2393639),
    ("5.0", "Nebius", "h200", "llama3.1-405B", 512, 1152, 1, 4, 8, 2, 8, 50.0160, 188377),
    ("5.0", "Nebius", "h200", "llama3.1-405B", 1024, 1152, 1, 4, 8, 2, 8, 25.3564, 371362),
    ("5.0", "CoreWeave", "gb200", "llama3.1-405B", 512, 896, 1, 4, 8, 2, 8, 19.3147, 379637),
    ("5.0", "CoreWeave", "gb200", "llama3.1-405B", 1024, 768, 1, 4, 8, 2, 8, 8.4484, 742489),
    ("5.0", "CoreWeave", "gb200", "llama3.1-405B", 1536, 1152, 1, 4, 8, 2, 8, 8.5046, 1105383),
    ("5.0", "CoreWeave", "gb200", "llama3.1-405B", 2048, 1280, 1, 4, 8, 2, 8, 7.1644, 1459443),
    ("5.0", "CoreWeave", "gb200", "llama3.1-405B", 2496, 1248, 1, 4, 8, 2, 8, 5.8268, 1751565),
    ("5.0", "NVIDIA", "gb200", "llama3.1-405B", 256, 448, 1, 4, 8, 2, 8, 19.1441, None),
    ("5.0", "NVIDIA", "gb200", "llama3.1-405B", 512, 896, 1, 4, 8, 2, 8, 19.4742, None),
)
"""mlcommons/training_results_v3.0@63e326c, v3.1@d06288b, v4.0@6fe9543, v4.1@b87b9e3 and v5.0@0fdc28f,
results/*/gpt3 and llama31_405b: round, submitter, device, model, devices, batch, micro-batch, tensor, pipeline,
context, virtual stages, seconds, and tokens per second, which include the time of validation in rounds 3 and 4. Logs of
round 5 state sequences per second, of 8,192 tokens each."""

LABELS = {"h100-80gb": "MLPerf, H100", "h200": "MLPerf, H200", "gb200": "MLPerf, GB200"}


def mlperf() -> dict[str, list[Row]]:
    """Return the rows by table name."""
    return {
        label: [_row(label, *row[:-1]) for row in MLPERF if row[2] == device]
        for device, label in LABELS.items()
    }


def _row(
    label: str, edition: str, submitter: str, device: str, name: str, devices: int, batch: int, micro_batch: int,
    tensor: int, pipeline: int, context: int, virtual: int, seconds: float,
) -> Row:  # fmt: skip
    return megatron_row(
        label, name, device, devices, seconds, software="nemo", release=f"MLPerf {edition}, {submitter}",
        precision="fp8-mixed", global_batch=batch, micro_batch=micro_batch, tensor=tensor, pipeline=pipeline,
        context=context, virtual_stages=virtual,
    )  # fmt: skip
