"""DeepSpeed's own estimates of model states, in 16-bit training with Adam, as its code computes them.

`estimate_zero2_model_states_mem_needs` and its ZeRO-3 sibling. The rule for ZeRO-2 changed: its documentation still
prints figures of 4P + 16P/N bytes, where the code of 2025 (commit edaa722) has 2P + 18P/N.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import unknown_name

Floats = npt.NDArray[np.float64]
ZERO_2_RULES = {"now": (2, 18), "before": (4, 16)}
"""Bytes of each parameter on every device, and divided by the devices."""


class Estimate(NamedTuple):
    """Bytes on one device and on its node's host."""

    device: Floats
    host: Floats


def zero_2_estimate(
    num_params: npt.ArrayLike,
    *,
    devices: npt.ArrayLike,
    per_node: npt.ArrayLike,
    offload: bool = False,
    buffer_factor: float = 1.5,
    rule: str = "now",
) -> Estimate:
    """Model states under ZeRO-2; arrays broadcast.

    Args:
        num_params: P.
        devices: N, in all nodes.
        per_node: Devices of a node.
        offload: Whether the optimizer is on the host.
        buffer_factor: What the host holds for each byte that it needs.
        rule: ``now``, or ``before`` for what the documentation prints.

    Source:
        deepspeedai/DeepSpeed runtime/zero/stage_1_and_2.py.

    Example:
        >>> round(float(zero_2_estimate(2.851e9, devices=8, per_node=8, rule="before").device) / 2**30, 2)
        15.93
    """
    if rule not in ZERO_2_RULES:
        raise unknown_name("rule", rule, ZERO_2_RULES)
    params, ranks = np.asarray(num_params, float), np.asarray(devices, float)
    whole, divided = ZERO_2_RULES[rule]
    if offload:
        return Estimate(2 * params, params * np.maximum(4 * ranks, 16) * buffer_factor)
    return Estimate(
        whole * params + divided * params / ranks, params * 4 * np.asarray(per_node) * buffer_factor
    )


def zero_3_estimate(
    num_params: npt.ArrayLike, *, largest_layer: npt.ArrayLike, devices: npt.ArrayLike
) -> Floats:
    """Bytes on one device under ZeRO-3 without offloading: 4 of each of the largest layer's parameters, and 18P/N.

    Source:
        deepspeedai/DeepSpeed runtime/zero/stage3.py.
    """
    shard = np.asarray(num_params, float) / np.asarray(devices)
    return np.asarray(4 * np.asarray(largest_layer) + 18 * shard)
