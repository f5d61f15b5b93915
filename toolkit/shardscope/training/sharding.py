"""Functions for tensors that are sharded over ranks: norms, clipping, and initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

ReduceSquares = Callable[[Tensor], Tensor]
"""Function that sums a float64 vector of squared norms over all ranks that have different pieces of the tensors."""

_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


class TensorPart(Tensor):
    """A rank's part of a tensor of which other ranks have the rest: the shape of the whole tensor, the part's memory.

    It is what a checkpoint saves and fills, and takes part in no computation.
    """

    part: Tensor
    boxes: tuple[tuple[Tensor, tuple[int, ...]], ...]
    """Rectangular pieces of this rank's elements, as views, with their offsets in the whole tensor."""

    @staticmethod
    def of(part: Tensor, shape: Sequence[int], boxes: Sequence[tuple[Tensor, tuple[int, ...]]]) -> TensorPart:
        """Return the part of a tensor of this shape; `part` may be a DTensor of other ranks with the same part."""
        found: TensorPart = Tensor._make_wrapper_subclass(  # noqa: SLF001
            TensorPart, torch.Size(shape), dtype=part.dtype, device=part.device
        )
        found.part, found.boxes = part, tuple(boxes)
        return found

    def detach(self) -> TensorPart:
        """Return the part itself, which has no gradient."""
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorPart of {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> NoReturn:
        raise AssertionError(f"{func} on a part of a tensor")


def largest_over_ranks(flag: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace a flag with its maximum over the ranks of a group (None for all ranks), in place."""
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)


def start_alike(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast parameters and buffers from the first rank of a group, because the ranks' initial values may differ.

    Without a group, from the first of all ranks.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over all elements of all tensors, as a float64 vector with one element."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64)
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return torch.stack(norms).double().square().sum(dim=0, keepdim=True)


def global_norm(
    square: Tensor, tensors: Sequence[Tensor], reduce_square: ReduceSquares | None = None
) -> Tensor:
    """Return the square root of a sum of squares over all ranks; if the sum overflowed, recompute it with scaling.

    Args:
        square: The sum of squares, a float64 vector with one element, the same on every rank.
        tensors: The tensors that this rank contributed to the sum.
        reduce_square: The function that summed `square` over the ranks; None if each rank has all tensors.

    Returns:
        A 0-d tensor, the same on every rank; finite unless an element of the tensors is not finite.
    """
    if square.isfinite():
        return square[0].sqrt()
    largest = [tensor.abs().amax().double() for tensor in tensors if tensor.numel()]
    scale = torch.stack(largest).amax(dim=0, keepdim=True) if largest else torch.zeros_like(square)
    # only a sum over ranks is available, but the sum of the maxima is as good a scale as their maximum
    scale = _reduced(scale, reduce_square)
    if not scale.isfinite():
        return square[0].sqrt()
    scaled = sum_of_squares([tensor.double() / scale for tensor in tensors]).to(square.device)
    return (scale * _reduced(scaled, reduce_square).sqrt())[0]


def _reduced(square: Tensor, reduce_square: ReduceSquares | None) -> Tensor:
    return square if reduce_square is None else reduce_square(square)


def shrink_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place by `factor` (at most 1); in two steps if the factor is subnormal in their dtype."""
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
    duplicate_grad_params: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Scale the gradients of all ranks so that their norm, as one concatenated vector, is at most `max_norm`.

    Args:
        parameters: The parameters on this rank: whole tensors or shards.
        max_norm: Maximum norm, above 0.
        reduce_square: Function that sums the squared norm over all ranks that have different gradients; None if this
            rank has all of them.
        duplicate_grad_params: Those of `parameters` whose gradients are already counted on another rank.

    Returns:
        The norm before scaling, a 0-d tensor, the same on every rank.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    left_out = {id(parameter) for parameter in duplicate_grad_params}
    grads = [_elements(p) for p in held]
    counted = [g for p, g in zip(held, grads, strict=True) if id(p) not in left_out]
    square = sum_of_squares(counted)
    if grads:
        square = square.to(grads[0].device)
    norm = global_norm(_reduced(square, reduce_square), counted, reduce_square)
    shrink_(grads, float((max_norm / (norm + _EPS)).clamp(max=1.0)))
    return norm


def _elements(parameter: nn.Parameter) -> Tensor:
    """Return the elements of this rank's gradient, to modify in place: a shard, or the values of a sparse gradient."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return local(grad)
    parameter.grad = grad.coalesce()
    return parameter.grad.values()
