"""Input check of the process group: it accepts tensors whose bytes are their values, and rejects all others by name.

Transports copy the bytes at the address of a tensor. A tensor without its own memory has no address, and reading there
would kill the process with a signal. The bytes of some tensors are not their values: a conjugated view, for example,
has the bytes of the values before conjugation, and a non-contiguous tensor has other values in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from shardscope.errors import ShardscopeError

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
"""For each kind of tensor that no transport carries: a test for it, the reason, and the remedy."""


Copies = list[tuple[Tensor, Tensor]]
"""Tensors that a collective writes, each with the contiguous copy that it writes in the tensor's place."""


def plain(argument: Argument, *, may_be_sparse: bool = False, written: Copies | None = None) -> Argument:
    """Return an argument of a collective with each tensor replaced by a contiguous one whose memory holds its values.

    For the result of a functional collective, that is the tensor that it waits for; for a `DTensor`, this rank's shard.
    As with gloo, writing results to tensors that require grad bypasses autograd. Transports ignore strides, so a tensor
    that is not contiguous is replaced by a copy.

    Args:
        argument: A tensor, nested sequences of tensors, or anything else, which is returned unchanged.
        may_be_sparse: Whether sparse COO tensors are allowed.
        written: For an argument that the collective writes, a list to which each tensor that was replaced by a copy is
            added, with the copy; give it to `copied_back`. None for an argument that is only read.

    Raises:
        ShardscopeError: No transport can carry one of the tensors.
    """
    found: Any = argument
    if isinstance(argument, Tensor):
        found = argument if _is_plain(argument) else _made_plain(argument, may_be_sparse, written)
    elif isinstance(argument, list | tuple):
        found = [plain(each, may_be_sparse=may_be_sparse, written=written) for each in argument]
    return found  # type: ignore[no-any-return]


def with_rows(argument: Argument) -> Argument:
    """Return an argument of a collective with each 0-dimensional tensor replaced by a view of shape [1]."""
    found: Any = argument
    if isinstance(argument, Tensor):
        found = argument if argument.dim() else argument.view(1)
    elif isinstance(argument, list | tuple):
        found = [with_rows(each) for each in argument]
    return found  # type: ignore[no-any-return]


def copied_back(work: dist.Work, copies: Copies) -> dist.Work:
    """Return a handle that completes when the collective's results have been copied to the original tensors."""
    return _CopyingWork(work, copies) if copies else work


class _CopyingWork(dist.Work):
    """Handle of a collective that copies its results to the original tensors once it has completed."""

    def __init__(self, inner: dist.Work, copies: Copies) -> None:
        super().__init__()
        self._inner, self._copies, self._lock = inner, copies, threading.Lock()

    def _copy(self) -> None:
        with self._lock, torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            self._copies = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._copy()
        return done

    def is_completed(self) -> bool:
        is_over = self._inner.is_completed()
        if is_over:
            self._copy()
        return is_over

    def _source_rank(self) -> int:  # torch asks for it after a receive from any rank
        return self._inner._source_rank()  # noqa: SLF001 - as torch does

    def get_future(self) -> torch.futures.Future[Any]:
        def finished(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            self._copy()
            return value

        return self._inner.get_future().then(finished)


def _is_plain(tensor: Tensor) -> bool:
    """Return, by a fast check, whether a tensor can be carried unchanged; False if a closer check is needed."""
    if type(tensor) not in _TORCHS_OWN or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        if not (tensor.is_contiguous() and tensor.data_ptr()):
            return False
        end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
        return end <= tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # torch's answer for tensors that wrap others
        return False


def _made_plain(tensor: Tensor, may_be_sparse: bool, written: Copies | None) -> Tensor:
    found = _inner(tensor)
    if may_be_sparse and found.layout == torch.sparse_coo:
        return found
    _check(found)
    if found.is_contiguous():
        return found
    copy = found.contiguous()
    if written is not None:
        if _may_overlap(found):
            raise ShardscopeError(
                f"a collective cannot write to a tensor of shape {tuple(found.shape)} and strides {found.stride()}, "
                "because some of its elements share memory; pass a copy, such as contiguous() returns"
            )
        written.append((found, copy))
    return copy


_TORCHS_OWN = (Tensor, Parameter)


def _may_overlap(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory; False if each stride exceeds the extent of smaller ones."""
    last = 0
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and stride <= last:
            return True
        last += (count - 1) * stride
    return False


def _inner(tensor: Tensor) -> Tensor:
    if type(tensor) in _TORCHS_OWN:
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
        raise ShardscopeError(f"a collective cannot send or receive this {kind}, because {what}; {do}")


def has_memory(tensor: Tensor) -> bool:
    """Return whether the storage of a strided tensor really contains all its elements."""
    if not tensor.numel():
        return True
    try:
        size = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError):  # torch's answer for tensors that wrap others
        return False
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size() <= size
