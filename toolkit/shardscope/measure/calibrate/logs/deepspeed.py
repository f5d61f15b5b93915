"""DeepSpeed's own configuration, as printed in a log; it may differ from the arguments of Megatron-DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardscope.errors import SpecError, quoted
from shardscope.measure.calibrate.logs.arguments import Arguments, flag, is_set, table
from shardscope.measure.calibrate.logs.text import Line

_PRINTED = re.compile(r"\[config\.py:\d+:print\w*\] +(\w+) [ .]*(\S.*)")
_JSON = re.compile(r"\bjson = (?=\{)")
_OFFLOADING = ("cpu_offload", "cpu_optimizer", "checkpoint_in_cpu")
_OF_JSON = re.compile(r"\s*[\"{}\[\]]")
_OFFLOADS = {
    (): "none",
    ("optimizer",): "optimizer",
    ("optimizer", "param"): "states",
    ("activations",): "activations",
    ("activations", "optimizer", "param"): "all",
}
"""Values of `Layout.offload` by the tensors in host memory."""
_OPTIMIZERS = {None, "adam", "adamw"}
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, -1, "", "none", {}, [])
_DEVICES = {None, "none", "cpu"}


def is_used(arguments: Arguments) -> bool:
    """Return whether DeepSpeed runs the training: its flag is on or, as in its forks, only a ZeRO stage is set.

    Raises:
        SpecError: DeepSpeed is off, but something is offloaded.
    """
    found = flag(arguments, "deepspeed", default="zero_stage" in arguments)
    moved = next((key for key in _OFFLOADING if flag(arguments, key)), None)
    if moved is not None and not found:
        raise SpecError(
            f"{moved}=True without deepspeed=True cannot be expressed by rows; give rows of runs without"
        )
    return found


def settings(arguments: Arguments, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the ZeRO stage, and what is offloaded to host memory.

    Raises:
        SpecError: The stage is unknown, DeepSpeed's own configuration contradicts the arguments, or a layout cannot
            express what is offloaded.
    """
    config = _config(lines)
    zero = config.get("zero_optimization") or {}
    printed = {match[1]: match[2] for line in lines if (match := _PRINTED.search(line.text))}
    stage = printed.get("zero_optimization_stage", str(zero.get("stage", "")))
    stated = arguments.get("zero_stage", "").removesuffix(".0")
    if not stage:
        stage = stated
    if stage not in {"0", "1", "2", "3"}:
        raise SpecError(
            f"deepspeed=True with zero_stage={stated or None} does not say ZeRO's stage; give the whole log, with the "
            "configuration that DeepSpeed prints"
        )
    _check_understood(config)
    if not is_set(arguments, "rampup_batch_size"):
        _check_batches(arguments, printed)
    # DeepSpeed's BF16_Optimizer, which its pipelines use without ZeRO, partitions its states as stage 1 does.
    is_piped = arguments.get("pipeline_model_parallel_size", "1") != "1"
    shards = stage == "0" and is_piped and flag(arguments, "bf16")
    return {"zero": 1 if shards else int(stage), "offload": _offload(arguments, zero)}


def _config(lines: Sequence[Line]) -> Mapping[str, Any]:
    """Return the JSON that DeepSpeed prints after its settings, without interleaved output of other ranks."""
    for place, line in enumerate(lines):
        if match := _JSON.search(line.text):
            rest = (each.text for each in lines[place + 1 : place + 1000] if _OF_JSON.match(each.text))
            try:
                found: Mapping[str, Any] = json.JSONDecoder().raw_decode(
                    "\n".join([line.text[match.end() :], *rest])
                )[0]
            except (ValueError, RecursionError):
                raise SpecError(
                    "DeepSpeed's configuration ('json = {...') is incomplete; give the original, unedited log"
                ) from None
            return found
    return {}


def _check_understood(config: Mapping[str, Any]) -> None:
    for path in table()["refused_of_deepspeed"]:
        found: Any = config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is True or found not in _NEUTRAL:
            raise SpecError(
                f"DeepSpeed's configuration has {path}={quoted(found)}, which rows cannot express; give rows of runs "
                "without"
            )
    rule = (config.get("optimizer") or {}).get("type")
    if (rule if rule is None else str(rule).lower()) not in _OPTIMIZERS:
        raise SpecError(
            f"DeepSpeed's configuration has optimizer.type={quoted(rule)}, which rows cannot express; Adam and "
            "AdamW can"
        )


def _check_batches(arguments: Arguments, printed: Mapping[str, str]) -> None:
    for ours, theirs in (
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("global_batch_size", "train_batch_size"),
    ):
        if theirs in printed and arguments.get(ours) != printed[theirs]:
            raise SpecError(
                f"{ours}={arguments.get(ours)} contradicts DeepSpeed's {theirs}={printed[theirs]}; give rows "
                "of runs in which both agree"
            )


def _offload(arguments: Arguments, zero: Mapping[str, Any]) -> str:
    devices = {part: (zero.get(f"offload_{part}") or {}).get("device") for part in ("optimizer", "param")}
    if (odd := next((device for device in devices.values() if device not in _DEVICES), None)) is not None:
        raise SpecError(
            f"offload to device={odd!r} cannot be expressed by rows; give rows of runs that offload to cpu"
        )
    moved = {part for part, device in devices.items() if device == "cpu"}
    if zero.get("cpu_offload") or flag(arguments, "cpu_offload") or flag(arguments, "cpu_optimizer"):
        moved.add("optimizer")
    if zero.get("cpu_offload_params"):
        moved.add("param")
    if flag(arguments, "checkpoint_in_cpu"):
        moved.add("activations")
    if (found := _OFFLOADS.get(tuple(sorted(moved)))) is None:
        raise SpecError(
            f"offload of {' and '.join(sorted(moved))} to the CPU cannot be expressed by rows; give rows of runs "
            "without"
        )
    return found
