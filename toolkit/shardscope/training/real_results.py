"""Results of operations on fake tensors that differ from those of a real run.

- Some losses allocate one value per element, and return their sum or mean in that storage, which the loss keeps alive.
- ``_grouped_mm``, with which Hugging Face's models compute experts, supports all dtypes in a real run, but only
  bfloat16 on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_GROUPED = _ATEN._grouped_mm.default  # noqa: SLF001 - its name
_LOSSES = (_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default, _ATEN.binary_cross_entropy.default)


class RealResults(TorchDispatchMode):
    """Mode in which operations on fake tensors return results with the storages of a real run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED:
            one, other, *rest = args
            result = func(one.to(torch.bfloat16), other.to(torch.bfloat16), *rest, **(kwargs or {}))
            return result.to(one.dtype)
        result = func(*args, **(kwargs or {}))
        if func in _LOSSES and not result.ndim and args[0].numel():
            return torch.empty_like(args[0], dtype=result.dtype).resize_(())
        return result
