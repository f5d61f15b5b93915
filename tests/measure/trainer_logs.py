"""Logs in the formats of Megatron, and the rows that are read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope.measure.calibrate.logs import row_of_log
from shardscope.spec.model import Transformer

BASE: dict[str, Any] = {
    "bf16": True, "fp16": False, "data_parallel_size": 4, "world_size": 32, "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "global_batch_size": 256, "micro_batch_size": 1,
    "num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_experts": None, "seq_length": 8192,
    "max_position_embeddings": 8192, "position_embedding_type": "learned_absolute", "optimizer": "adam",
    "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
    "sequence_parallel": True, "transformer_impl": "transformer_engine", "use_distributed_optimizer": True,
    "rank": 0, "lr": 0.0003, "data_path": "['/data/corpus_text_document']",
}  # fmt: skip
OLD = {
    name: value for name, value in BASE.items() if not name.startswith(("recompute", "context", "sequence_p"))
}
"""Arguments of a release before 2022."""


def arguments(base: dict[str, Any] | None = None, **changed: Any) -> str:
    values = {**(BASE if base is None else base), **changed}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
            " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)",
            "",
        ]
    )


def step(number: int, ms: float, batch: int | None = 256, *, unit: str = "ms") -> str:
    of_batch = "" if batch is None else f" global batch size: {batch:5d} |"
    return (
        f" iteration {number:8d}/     500 | consumed samples: {number * 256:12d} | elapsed time per iteration "
        f"({unit}): {ms:.1f} | learning rate: 3.000E-04 |{of_batch} lm loss: 2.1E+00 | loss scale: 1.0 | grad norm: "
        "0.9 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def steps(times: Sequence[float], batch: int | None = 256, *, first: int = 1) -> str:
    return "".join(step(first + place, ms, batch) for place, ms in enumerate(times))


STEPS = steps([90000.0, 40000.0, 20010.0, 20000.0, 19990.0])


def row(text: str, given_model: Transformer | None = None) -> dict[str, Any]:
    return dict(row_of_log(text, "train.log", given_model))


def ms(text: str) -> float:
    found: float = row(text)["step_time_ms"]
    return found
