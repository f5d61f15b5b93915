"""PyTorch's counter of FLOPs, with the operations that it leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


_ALSO_COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}  # noqa: SLF001 - its name
"""FLOP formula of an operation that PyTorch's counter does not count: the CPU attention kernel."""


def flop_counter() -> FlopCounterMode:
    """Return a context manager whose ``get_total_flops()`` is the number of FLOPs of matrix products within it."""
    return FlopCounterMode(display=False, custom_mapping=_ALSO_COUNTED)
