"""What of torch is private or drifts between releases, in one place; each has a plain fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


def fsdp_params(model: nn.Module) -> list[Any]:
    """What FSDP2 knows of each parameter that it shards in `model`; empty where it shards nothing."""
    ask = [getattr(module, "_get_fsdp_state", None) for module in model.modules()]
    groups = [group for state in ask if state is not None for group in _fsdp_groups(state())]
    return [param for group in groups for param in group.fsdp_params]


def _fsdp_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # torch 2.11 knows one group a module
        return [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]
    return list(several)


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """After `unscale_`: for each device a tensor of one element that is 1 where a gradient is not finite.

    The scaler reads these tensors when it decides whether to step; they may be written to.
    """
    state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001
    return list(state["found_inf_per_device"].values())
