"""The door of the process group: it lets in tensors whose bytes are their values, and refuses all others by name.

Transports copy the bytes at the address of a tensor. A tensor without memory of its own has no address, and reading
there would end the process with a signal. The bytes of other tensors are not their values: those of a conjugated view,
for example, are the values before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from shardscope.errors import SpecError

Argument = TypeVar("Argument")

_NOT_PLAIN: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (lambda each: isinstance(each, FakeTensor), "a fake tensor has no data", "call it outside FakeTensorMode"),
    (lambda each: each.is_meta, "a tensor on the meta device has no data", "move it to a real device"),
    (lambda each: each.is_nested, "its rows differ in length", "pass its values() and offsets()"),
    (lambda each: each.is_quantized, "a quantized tensor keeps its scale elsewhere", "pass int_repr() and the scale"),
    (lambda each: each.layout != torch.strided, "its layout is not strided", "pass to_dense()"),
    (lambda each: each.is_conj() or each.is_neg(), "its memory holds the values before they are conjugated or negated",
     "pass resolve_conj().resolve_neg()"),
    (lambda each: not has_memory(each), "not all of it is in memory of its own",
     "pass the tensor that it wraps or a copy"),
)  # fmt: skip
"""For each kind of tensor that no transport carries: a test, what is wrong with it, and what to do."""


def plain(argument: Argument, *, may_be_sparse: bool = False) -> Argument:
    """Return an argument of a collective with each tensor replaced by the one whose memory holds its values.

    For the result of a functional collective, that is the tensor that it waits for; for a `DTensor`, this rank's shard.
    As with gloo, results are written to tensors that require gradients without autograd.

    Args:
        argument: A tensor, nested sequences of tensors, or anything else, which is returned unchanged.
        may_be_sparse: Whether sparse COO tensors are allowed.

    Raises:
        SpecError: No transport can carry one of the tensors.
    """
    found: Any = argument
    if isinstance(argument, list | tuple):
        found = [plain(each, may_be_sparse=may_be_sparse) for each in argument]
    elif isinstance(argument, Tensor):
        found = _inner(argument)
        if not (may_be_sparse and found.layout == torch.sparse_coo):
            _check(found)
    return found  # type: ignore[no-any-return]


def _inner(tensor: Tensor) -> Tensor:
    if type(tensor) in (Tensor, Parameter):
        return tensor.detach() if tensor.requires_grad else tensor  # some of gloo's copies refuse leaves
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # slow to import
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return _inner(tensor.trigger_wait())
    if isinstance(tensor, DTensor):
        return _inner(tensor._local_tensor)  # noqa: SLF001 - `to_local` returns a view that autograd tracks
    return tensor


def _check(tensor: Tensor) -> None:
    problem = next(((what, do) for is_one, what, do in _NOT_PLAIN if is_one(tensor)), None)
    if problem is not None:
        what, do = problem
        kind = f"{type(tensor).__name__} of {tensor.dtype}"
        raise SpecError(f"a collective cannot send or receive this {kind}, because {what}; {do}")


def has_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a strided tensor are in memory of its own."""
    if not tensor.numel():
        return True
    try:
        size = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # torch's answer for tensors that wrap others
        return False
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= size
