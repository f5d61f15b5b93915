"""Divides sequences over the ranks of a context group, and makes a model compute with one rank's part of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardscope.errors import SpecError
from shardscope.spec.context_comm import ContextComm, parts_per_rank
from shardscope.training.data import map_tensors, tensors_of
from shardscope.training.models.routing import Router
from shardscope.training.sequence.attention import attention_by_heads, attention_in_blocks
from shardscope.training.sequence.axis import SequenceAxis
from shardscope.training.tensor.functions import with_adjoint


class SequenceSplit:
    """Sequences divided over the ranks of a context group.

    Each rank gets one part of every sequence, or, unless attention is computed by heads, two: an early and a late one,
    so that causal attention is equal work on all ranks (see `blocks_of`).

    Args:
        axis: The ranks of the group.
        comm: How attention communicates.
    """

    def __init__(self, axis: SequenceAxis, comm: ContextComm) -> None:
        self.axis, self.comm = axis, comm

    def __deepcopy__(self, memo: dict[int, object]) -> Self:  # copies of a model have the same ranks
        return self

    # Batches

    def part(self, value: Any) -> Any:
        """Return this rank's part of tensors of shape ``(N, T, ...)``: of a batch, or of outputs.

        Raises:
            SpecError: A tensor has no dimension of sequences, or their length is not divisible.
        """
        length = length_of((value, ()))
        return map_tensors(lambda tensor: self._part(tensor, length), value)

    def _part(self, tensor: Tensor, length: int) -> Tensor:
        size, each = self.axis.size, parts_per_rank(self.comm)
        if tensor.dim() < 2 or tensor.shape[1] != length:
            raise SpecError(
                f"context={size} divides sequences, the second dimension of every tensor of a batch, but one has the "
                f"shape {tuple(tensor.shape)}; use inputs and targets of shape (samples, tokens, ...), or context=1"
            )
        if length % (each * size):
            raise SpecError(
                f"context={size} with context_comm={self.comm!r} needs sequences of a multiple of {each * size} "
                f"tokens, but they have {length}; use a multiple, or another number of context ranks"
            )
        parts = tensor.chunk(each * size, 1)
        return torch.cat([parts[place] for place in self.own_places], 1)

    def _places(self, rank: int) -> list[int]:
        """Return the places of a rank's parts among all parts of a sequence."""
        both = [rank, 2 * self.axis.size - 1 - rank]
        return both[: parts_per_rank(self.comm)]

    # Routers of experts, whose capacity and balance loss are those of whole sequences

    @property
    def own_places(self) -> list[int]:
        """Places of this rank's parts among all parts of a sequence."""
        return self._places(self.axis.rank)

    def of_all_parts(self, own: Tensor) -> Tensor:
        """Return numbers of all parts of sequences `(N, parts, ...)`, in order, for those of this rank's parts."""
        places = [place for rank in range(self.axis.size) for place in self._places(rank)]
        order = sorted(range(len(places)), key=places.__getitem__)
        return self.axis.all_gather(own).movedim(0, 1).flatten(1, 2)[:, order]

    def mean(self, own: Tensor) -> Tensor:
        """Return the mean of a tensor over the ranks; the gradient of each rank's is the mean of those of the mean."""
        return with_adjoint(own, self._mean, self._mean)

    def _mean(self, own: Tensor) -> Tensor:
        total = own / self.axis.size
        self.axis.sum_(total)
        return total

    # Models

    def install(self, model: nn.Module) -> nn.Module:
        """Make `model`, in place, take this rank's parts of sequences, and return it.

        In its forward pass, `scaled_dot_product_attention` attends to whole sequences, and positions that count from 0,
        as ``torch.arange(T)`` or as the first T rows of a parameter or a buffer, are those of this rank's tokens.
        """
        cls = type(model)
        model.__class__ = type(
            f"ContextParallel{cls.__name__}", (_ContextParallel, cls), {"of_whole_sequences": cls}
        )
        model.sequence_split = self  # type: ignore[assignment] # not a parameter
        for module in model.modules():
            if isinstance(module, Router):
                module.sequences = self
        return model

    def passing(self, model: nn.Module, length: int) -> AbstractContextManager[object]:
        """Return a context manager in which layers of `model` take parts of sequences, of `length` tokens each.

        `install` makes the model's own forward pass enter it. It is for layers that are called by themselves, as in the
        stages of a pipeline.
        """
        return _ForwardMode(self, length, {id(buffer) for buffer in model.buffers()})

    def positions(self, positions: Tensor) -> Tensor:
        """Return the positions of this rank's tokens in whole sequences, for positions 0 to T - 1 in its part."""
        parts = positions.chunk(len(self.own_places))
        before = (place - own for own, place in enumerate(self.own_places))  # parts of other ranks
        return torch.cat([part + count * len(part) for part, count in zip(parts, before, strict=True)])

    def attend(  # noqa: PLR0917 - torch's signature
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG002
    ) -> Tensor:  # fmt: skip
        """Compute `torch.nn.functional.scaled_dot_product_attention` over whole sequences.

        Raises:
            SpecError: The attention has a mask, dropout or shapes that are not available with context parallelism.
        """
        self._require_possible(query, key, value, attn_mask, dropout_p)
        if torch.is_autocast_enabled(query.device.type):
            short = torch.get_autocast_dtype(query.device.type)
            query, key, value = (_shortened(each, short) for each in (query, key, value))
        if self.comm == "ulysses":
            return attention_by_heads(query, key, value, axis=self.axis, is_causal=is_causal, scale=scale)
        return attention_in_blocks(
            query, key, value, axis=self.axis, in_ring=self.comm != "all-gather", is_causal=is_causal,
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        )  # fmt: skip

    def _require_possible(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> None:
        size = self.axis.size
        if mask is not None:
            raise SpecError(
                f"the model's attention has an attn_mask, which context={size} does not divide; use is_causal=True or "
                "no mask, or context=1"
            )
        if dropout:
            raise SpecError(
                f"the model's attention has dropout_p={dropout}, which is not available with context={size}; use "
                "dropout_p=0, or context=1"
            )
        if query.dim() != 4 or query.shape[2] != key.shape[2] or key.shape != value.shape:
            raise SpecError(
                f"context={size} needs self-attention with tensors of shape (samples, heads, tokens, width), but the "
                f"model's have {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; use context=1"
            )
        if self.comm == "ulysses" and (query.shape[1] % size or key.shape[1] % size):
            raise SpecError(
                f"context={size} does not divide the {math.gcd(query.shape[1], key.shape[1])} heads of a rank, as "
                "context_comm='ulysses' requires; use fewer context ranks, or context_comm='all-gather' or 'ring'"
            )


def passing(model: nn.Module, inputs: Any) -> AbstractContextManager[object]:
    """Return a context manager in which layers of `model` compute as in its own forward pass: with parts of sequences,
    if a `SequenceSplit` has been installed.
    """
    if not isinstance(model, _ContextParallel):
        return nullcontext()
    return model.sequence_split.passing(model, length_of((inputs, ())))


def length_of(batch: Any) -> int:
    """Return the number of tokens of the sequences in a pair of inputs and targets, or of arguments; 0 without any."""
    return next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 0)


def _shortened(tensor: Tensor, short: torch.dtype) -> Tensor:
    """Return a tensor as autocast would pass it to attention, which does not cast fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(short)


class _ContextParallel(nn.Module):
    """Mixin of a model that processes one rank's part of each sequence."""

    sequence_split: SequenceSplit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.sequence_split.passing(self, length_of((args, kwargs))):
            return super().forward(*args, **kwargs)


class _ForwardMode(TorchFunctionMode):
    """Replaces attention and positions in a forward pass with parts of sequences.

    Args:
        split: The division.
        length: Number of tokens of a sequence on this rank.
        tables: Ids of tensors that may hold a row for each position, besides parameters.
    """

    def __init__(self, split: SequenceSplit, length: int, tables: Collection[int]) -> None:
        super().__init__()
        self.split, self.length, self.tables = split, length, tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.split.attend(*args, **kwargs)
        if func is torch.arange:
            found = func(*args, **kwargs)
            return self.split.positions(found) if self._counts(args, kwargs) else found
        if func is Tensor.__getitem__ and (place := self._rows(*args)) is not None:
            rows = self.split.positions(torch.arange(self.length, device=args[0].device))
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return args[0][(*index[:place], rows, *index[place + 1 :])]
        return func(*args, **kwargs)

    def _counts(self, args: Any, kwargs: Any) -> bool:
        """Return whether arguments of `torch.arange` count the rank's tokens from 0."""
        start, end = (0, *args) if len(args) == 1 else args[:2] if len(args) > 1 else (0, kwargs.get("end"))
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
        return bool(kwargs.get("start", start) == 0 and end == self.length and step == 1)

    def _rows(self, table: Any, index: Any) -> int | None:
        """Return which index takes the rank's first positions out of a table of all; None if none does."""
        if not (isinstance(table, nn.Parameter) or id(table) in self.tables):
            return None
        for place, each in enumerate(index if isinstance(index, tuple) else (index,)):
            if each is None or each is Ellipsis:
                return None
            if isinstance(each, slice) and each in (slice(self.length), slice(0, self.length)):
                return place if table.shape[place] >= self.length * self.split.axis.size else None
        return None
