"""Small helpers for tensors that are spread over ranks."""

from __future__ import annotations

import math
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


def global_norm(
    square: Tensor, tensors: Sequence[Tensor], reduce_square: ReduceSquares | None = None
) -> Tensor:
    """The root of a sum of squares over all ranks, computed anew where the squares were too large for their format.

    Args:
        square: The sum, a float64 vector of one element, the same on every rank.
        tensors: What this rank has contributed to it.
        reduce_square: What has summed it over the ranks.

    Returns:
        A 0-d tensor, the same on every rank; not finite only where an element is not.
    """
    if square.isfinite():
        return square[0].sqrt()
    largest = [tensor.abs().amax().double() for tensor in tensors if tensor.numel()]
    scale = torch.stack(largest).amax(dim=0, keepdim=True) if largest else torch.zeros_like(square)
    # a sum over the ranks is all there is, and it scales as well as the maximum
    scale = _reduced(scale, reduce_square)
    if not scale.isfinite():
        return square[0].sqrt()
    scaled = sum_of_squares([tensor.double() / scale for tensor in tensors]).to(square.device)
    return (scale * _reduced(scaled, reduce_square).sqrt())[0]


def _reduced(square: Tensor, reduce_square: ReduceSquares | None) -> Tensor:
    return square if reduce_square is None else reduce_square(square)


def shrink_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply by a factor of at most 1, in two steps where the tensors' format would lose it."""
    if factor == 1:
        return
    for tensor in tensors:
        is_lost = 0 < factor < torch.finfo(tensor.dtype).tiny
        for part in (math.sqrt(factor), math.sqrt(factor)) if is_lost else (factor,):
            tensor.mul_(part)


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
    grads = [_elements(p) for p in held]
    counted = [g for p, g in zip(held, grads, strict=True) if id(p) not in left_out]
    square = sum_of_squares(counted)
    if grads:
        square = square.to(grads[0].device)
    norm = global_norm(_reduced(square, reduce_square), counted, reduce_square)
    shrink_(grads, float((max_norm / (norm + _EPS)).clamp(max=1.0)))
    return norm


def _elements(parameter: nn.Parameter) -> Tensor:
    """What this rank has of the gradient, to be changed in place: a shard, or the values of a sparse one."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return local(grad)
    parameter.grad = grad.coalesce()
    return parameter.grad.values()
