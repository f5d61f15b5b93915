"""Small helpers for tensors that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

ReduceSquares = Callable[[Tensor], Tensor]
"""Takes this rank's sums of squares, a float64 vector; returns them summed over the ranks that hold other pieces."""

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that lies on this rank; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def largest_over_ranks(flag: Tensor) -> None:
    """Take the largest of a flag over all ranks, in place."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)


def start_alike(model: nn.Module) -> None:
    """Parameters and buffers become those of rank 0: a model may draw its own random numbers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements of all tensors, as a float64 vector of one element."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64)
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return torch.stack(norms).double().square().sum(dim=0, keepdim=True)


def clip_grad_norm_(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    reduce_square: ReduceSquares | None = None,
    uncounted: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Scale the gradients of all ranks so that their norm, taken as one vector, is at most `max_norm`.

    Args:
        parameters: What this rank holds: whole tensors or shards.
        max_norm: Above 0.
        reduce_square: Sums the one square over all ranks that hold distinct gradients; None where this rank
            holds all of them.
        uncounted: Parameters among them whose gradients another rank counts already.

    Returns:
        The norm before scaling, a 0-d tensor, the same on every rank.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    left_out = {id(parameter) for parameter in uncounted}
    grads = [local(p.grad) for p in held if p.grad is not None]
    square = sum_of_squares([g for p, g in zip(held, grads, strict=True) if id(p) not in left_out])
    if grads:
        square = square.to(grads[0].device)
    norm = (square if reduce_square is None else reduce_square(square))[0].sqrt()
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm
