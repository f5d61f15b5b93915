"""What of torch is private or drifts between releases, in one place; each has a plain fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

HAS_FUSED_ADAMW = hasattr(torch, "_fused_adamw_")
"""Whether torch's fused AdamW kernel can be called on bare tensors (true for 2.11 to 2.13)."""


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One AdamW step with learning rate 1 and no decay, in torch's fused kernel.

    Every tensor of one index is contiguous and of one shape, dtype and device; `steps` are float32 tensors of
    one element that already count this step.
    """
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        lr=1.0,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def top_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Pack and unpack of the innermost `saved_tensors_hooks` of this thread; there must be one."""
    from torch._C._autograd import _top_saved_tensors_default_hooks

    pack, unpack = _top_saved_tensors_default_hooks(False)
    return pack, unpack
