"""Precision recipes: number formats of computation, and dynamic loss scaling for fp16.

bf16-mixed and fp16-mixed are mixed precision in the sense of Micikevicius et al. (2018): weights, gradients and
optimizer state stay in fp32, and matrix products compute in the short format under autocast. fp16's narrow range needs
a scaled loss. The scale halves when a gradient overflows, and every rank skips that step: all ranks hold the same
reduced gradient, or, where each holds a piece of it, exchange the overflow flag (`Precision.share_overflow`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training import _compat
from shardscope.training.sharding import ReduceSquares, clip_grad_norm_

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
}


def weight_dtype(precision: str) -> torch.dtype:
    """The format of weights, gradients and optimizer state in a job's precision."""
    return torch.float64 if precision == "fp64" else torch.float32


class Precision:
    """The recipe of one job on one device.

    Attributes:
        share_overflow: Replaces a flag by its maximum over all ranks, in place. Set where ranks hold different pieces
            of the gradients, so that an overflow on one rank skips the step on all.
    """

    share_overflow: Callable[[Tensor], object] | None = None

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.compute_dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**15) if name == "fp16-mixed" else None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The format of weights, gradients and optimizer state."""
        return weight_dtype(self.name)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which matrix products compute in the short format."""
        if self.compute_dtype == self.weight_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss to call `backward` on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None where losses are not scaled."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        *,
        reduce_square: ReduceSquares | None = None,
        duplicate_grad_params: Sequence[nn.Parameter] = (),
    ) -> tuple[float | None, bool]:
        """Unscale, clip and step. Returns the gradient norm before clipping (None without) and whether it skipped.

        `reduce_square` and `duplicate_grad_params` are those of `clip_grad_norm_`, for distributed gradients.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            if self.share_overflow is not None:
                for flag in _compat.overflow_flags(self.scaler, optimizer):
                    self.share_overflow(flag)
        norm = None
        if clip_norm is not None:
            norm = clip_grad_norm_(
                parameters,
                clip_norm,
                reduce_square=reduce_square,
                duplicate_grad_params=duplicate_grad_params,
            )
        if self.scaler is None:
            optimizer.step()
            return None if norm is None else float(norm), False
        # not left to the scaler: torch's fused SGD would leave its first momentum uninitialised on a skipped step
        skipped = any(bool(flag) for flag in _compat.overflow_flags(self.scaler, optimizer))
        if not skipped:
            self.scaler.step(optimizer)
        self.scaler.update()
        return None if norm is None else float(norm), skipped

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Unscale gradients that another rank will update with; returns False if any is not finite."""
        if self.scaler is None:
            return True
        torch._foreach_mul_(list(gradients), 1.0 / self.scaler.get_scale())
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def follow(self, *, skipped: bool) -> None:
        """Update the loss scale after an update that another rank made or skipped."""
        if self.scaler is None:
            return
        # the scaler detects an overflow from gradients only: pass it one that overflows
        witness = nn.Parameter(torch.zeros(1, device=self.device))
        witness.grad = torch.full_like(witness, float("inf") if skipped else 0.0)
        optimizer = torch.optim.SGD([witness], lr=0.0)
        self.scaler.scale(witness.detach())  # initialises its scale, if no loss has been scaled here
        self.scaler.unscale_(optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its history."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
