"""Small tables of published figures, each with where it is printed; the oracles of `test_published`.

Figures are strings as printed, so that the number of digits is theirs.
"""

from __future__ import annotations

ZERO_TABLE_1 = {
    ("7.5e9", 1): ("120", "120", "120"),
    ("7.5e9", 4): ("52.5", "41.3", "30"),
    ("7.5e9", 16): ("35.6", "21.6", "7.5"),
    ("7.5e9", 64): ("31.4", "16.6", "1.88"),
    ("7.5e9", 256): ("30.4", "15.4", "0.47"),
    ("7.5e9", 1024): ("30.1", "15.1", "0.12"),
    ("128e9", 1): ("2048", "2048", "2048"),
    ("128e9", 4): ("896", "704", "512"),
    ("128e9", 16): ("608", "368", "128"),
    ("128e9", 64): ("536", "284", "32"),
    ("128e9", 256): ("518", "263", "8"),
    ("128e9", 1024): ("513", "257", "2"),
    ("1e12", 1): ("16000", "16000", "16000"),
    ("1e12", 4): ("7000", "5500", "4000"),
    ("1e12", 16): ("4750", "2875", "1000"),
    ("1e12", 64): ("4187", "2218", "250"),
    ("1e12", 256): ("4046", "2054", "62.5"),
    ("1e12", 1024): ("4011", "2013", "15.6"),
}
"""GB a device by parameters and ranks, stages 1 to 3: Rajbhandari et al. 2020, arXiv 1910.02054, table 1."""

ZERO_FIGURE_1 = ("120", "31.4", "16.6", "1.9")
"""GB for 7.5 billion parameters on 64 ranks, baseline and the three stages: the same paper, figure 1."""

ZERO_TABLE_2 = {
    1: ("2e9", "7.6e9", "14.4e9", "128e9"),
    2: ("4e9", "15.2e9", "28.8e9", "256e9"),
    4: ("8e9", "30.4e9", "57.6e9", "0.5e12"),
    8: ("16e9", "60.8e9", "115.2e9", "1e12"),
    16: ("32e9", "121.6e9", "230.4e9", "2e12"),
}
"""Parameters that fit 32 GB by model-parallel degree, at 64 replicas, in theory: the same paper, table 2."""

KORTHIKANTI_TABLE_3 = {
    "22B": {"heads": 64, "hidden": 6144, "layers": 48, "tensor": 8, "pipeline": 1, "micro_batch": 4, "chunks": 1},
    "175B": {"heads": 96, "hidden": 12288, "layers": 96, "tensor": 8, "pipeline": 8, "micro_batch": 1, "chunks": 3},
    "530B": {"heads": 128, "hidden": 20480, "layers": 105, "tensor": 8, "pipeline": 35, "micro_batch": 1, "chunks": 3},
    "1T": {"heads": 160, "hidden": 25600, "layers": 128, "tensor": 8, "pipeline": 64, "micro_batch": 1, "chunks": 1},
}  # fmt: skip
"""Configurations, of 2,048 tokens and 51,200 words: Korthikanti et al. 2022, arXiv 2205.05198, table 3."""

KORTHIKANTI_GLOBAL_BATCH = {"22B": 4, "175B": 64, "530B": 280, "1T": 512}

KORTHIKANTI_FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
"""GiB a device: parameters and optimizer state; activations; activations with sequence parallelism and selective
recomputation. Read off the same paper's figure 1 by Isaev et al. 2023 (Calculon), so not exact."""

KORTHIKANTI_FIGURE_7 = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}
"""Activations in percent of those of tensor parallelism alone: sequence parallelism, selective recomputation, both, and
full recomputation. Read off the same paper's figure 7 by the same."""

DEEPSPEED_EXAMPLE = {
    "millions of parameters": 2851,
    "devices": 8,
    "device": "15.93",
    "device, offload": "5.31",
    "host, offload": "127.48",
}
"""GiB (printed as GB) for ZeRO-2: DeepSpeed's documentation, memory requirements."""
