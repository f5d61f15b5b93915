"""Precision modes: the dtypes used in computation, and dynamic loss scaling for fp16.

In the modes bf16-mixed and fp16-mixed (mixed precision, Micikevicius et al. 2018), weights, gradients and optimizer
state are in fp32, and autocast computes matrix products in the 16-bit dtype. Because of its small range, fp16 needs a
scaled loss. When a gradient overflows, the scale is halved and every rank skips the step. All ranks detect the
overflow: they either have the same reduced gradient or, if each has only a piece of it, exchange a flag
(`Precision.share_overflow`).
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
    """Return the dtype of weights, gradients and optimizer state for a job's precision."""
    return torch.float64 if precision == "fp64" else torch.float32


class Precision:
    """The precision mode of one job on one device.

    Args:
        name: Name of the mode, a key of `DTYPES`.
        device: The device on which the rank computes.

    Attributes:
        share_overflow: Function that replaces an overflow flag with its maximum over all ranks, in place. Set if the
            ranks have different pieces of the gradients, so that after an overflow on one rank all ranks skip the step.
        around_step: Function that returns a context manager for a step of the optimizer.
    """

    share_overflow: Callable[[Tensor], object] | None = None
    around_step: Callable[[torch.optim.Optimizer], AbstractContextManager[object]] = nullcontext

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.compute_dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**15) if name == "fp16-mixed" else None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of weights, gradients and optimizer state."""
        return weight_dtype(self.name)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context manager for mixed precision; in fp32 and fp64 it is a no-op."""
        if self.compute_dtype == self.weight_dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call `backward`."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None if losses are not scaled."""
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
        """Unscale and clip the gradients, and take an optimizer step unless a gradient overflowed.

        Args:
            optimizer: The optimizer of `parameters`.
            parameters: The parameters on this rank: whole tensors or shards.
            clip_norm: Maximum gradient norm; None for no clipping.
            reduce_square: See `clip_grad_norm_`.
            duplicate_grad_params: See `clip_grad_norm_`.

        Returns:
            The gradient norm before clipping (None without clipping), and whether the step was skipped.
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
            with self.around_step(optimizer):
                optimizer.step()
            return None if norm is None else float(norm), False
        # no scaler.step() if the step is skipped, as PyTorch's fused SGD would then leave the momentum uninitialised
        skipped = any(bool(flag) for flag in _compat.overflow_flags(self.scaler, optimizer))
        if not skipped:
            with self.around_step(optimizer):
                self.scaler.step(optimizer)
        self.scaler.update()
        return None if norm is None else float(norm), skipped

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Unscale, in place, gradients that another rank will apply; return whether all of them are finite."""
        if self.scaler is None:
            return True
        torch._foreach_mul_(list(gradients), 1.0 / self.scaler.get_scale())
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def follow(self, *, skipped: bool) -> None:
        """Update the loss scale after another rank applied or skipped an update."""
        if self.scaler is None:
            return
        # the scaler detects an overflow only in a gradient, so it gets one that is infinite if the step was skipped
        witness = nn.Parameter(torch.zeros(1, device=self.device))
        witness.grad = torch.full_like(witness, float("inf") if skipped else 0.0)
        optimizer = torch.optim.SGD([witness], lr=0.0)
        self.scaler.scale(witness.detach())  # initialises the scale if no loss has been scaled here
        self.scaler.unscale_(optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its history; empty if losses are not scaled."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
