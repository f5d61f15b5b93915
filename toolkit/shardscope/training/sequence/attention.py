"""Attention of a rank's queries to whole sequences, of which each rank of a context group has a part.

Three ways to communicate, all exact:

all-gather   each rank gathers the keys and values of all ranks, in both passes, and reduce-scatters their gradients in
             the backward pass (Llama 3, arXiv 2407.21783, section 3.3.2)
ring         keys and values go around a ring of ranks, and in the backward pass their gradients too, while each rank
             computes with those that it has (Liu et al., arXiv 2310.01889)
ulysses      two all-to-alls exchange parts of sequences for parts of heads and back; between them, each rank attends
             with its heads to whole sequences (Jacobs et al., arXiv 2309.14509)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardscope.training.sequence.axis import Arriving, SequenceAxis
from shardscope.training.sequence.blocks import Block, attend, attend_backward, blocks_of
from shardscope.training.tensor.functions import with_adjoint


def attention_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axis: SequenceAxis,
    in_ring: bool,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return the attention output ``(N, H, T, d)`` of a rank's queries, by all-gather or around a ring.

    Args:
        query: Queries ``(N, H, T, d)`` of the rank's tokens.
        key: Keys ``(N, H / g, T, d)`` of the same tokens.
        value: Values, of the shape of the keys.
        axis: The ranks of the context group.
        in_ring: Whether keys and values go around a ring, and are not gathered at once.
        is_causal: Whether a token attends only to itself and earlier ones; see `blocks_of`.
        scale: Factor of the scores.
    """
    how = _How(axis, in_ring, is_causal, scale)
    found: Tensor = _InBlocks.apply(query, key, value, how)  # type: ignore[no-untyped-call]
    return found


def attention_by_heads(
    query: Tensor, key: Tensor, value: Tensor, *, axis: SequenceAxis, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the attention output of a rank's queries, computed for whole sequences with a part of the heads."""
    to_heads, to_tokens = partial(_by_heads, axis=axis), partial(_by_tokens, axis=axis)
    q, k, v = (with_adjoint(each, to_heads, to_tokens) for each in (query, key, value))
    shares_keys = query.shape[1] != key.shape[1]
    mixed = functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=shares_keys
    )
    return with_adjoint(mixed, to_tokens, to_heads)


class _How(NamedTuple):
    axis: SequenceAxis
    in_ring: bool
    is_causal: bool
    scale: float


class _InBlocks(Function):
    """Attention block by block, with outputs merged by their log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        output = sums = None
        for block, pair in _each(query, torch.stack([key, value]), how):
            keys, values = pair[..., block.keys, :]
            found = attend(
                query[..., block.queries, :], keys, values, is_causal=block.is_causal, scale=how.scale
            )
            if output is None or sums is None:
                output, sums = found[0].to(found[1].dtype), found[1]
            else:
                _merge_(output[..., block.queries, :], sums[..., block.queries], *found)
        assert output is not None
        assert sums is not None
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.how = how
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, sums = ctx.saved_tensors
        how, gradient, own = ctx.how, gradients[0], torch.stack([key, value])
        of_query = torch.zeros(query.shape, dtype=sums.dtype, device=query.device)
        of_pairs = _InRing(how.axis) if how.in_ring else _Gathered(how.axis, own, sums.dtype)
        for block, pair in _each(query, own, how):
            at, (keys, values) = block.queries, pair[..., block.keys, :]
            found, *of_pair = attend_backward(
                gradient[..., at, :],
                (query[..., at, :], keys, values),
                (output[..., at, :], sums[..., at]),
                is_causal=block.is_causal,
                scale=how.scale,
            )
            of_query[..., at, :] += found
            of_pairs.add(block, of_pair, sums.dtype)
        of_key, of_value = of_pairs.own().to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None


def _each(query: Tensor, own: Tensor, how: _How) -> Iterator[tuple[Block, Tensor]]:
    """Yield each block of the rank's attention, with the stacked keys and values of the rank that the block names."""
    blocks = blocks_of(how.axis.rank, how.axis.size, query.shape[2], is_causal=how.is_causal)
    yield from zip(blocks, _held(own, how.axis, in_ring=how.in_ring), strict=True)


def _held(own: Tensor, axis: SequenceAxis, *, in_ring: bool) -> Iterator[Tensor]:
    """Yield the stacked keys and values of each rank, from the own rank backwards."""
    if not in_ring:
        every = axis.all_gather(own)
        yield from (every[(axis.rank - step) % axis.size] for step in range(axis.size))
        return
    held = own
    for step in range(axis.size):
        arriving = axis.rotate(held) if step + 1 < axis.size else None
        yield held  # for a block to compute with, while the next ones arrive
        if arriving is not None:
            held = arriving.wait()


def _merge_(output: Tensor, sums: Tensor, more: Tensor, of_more: Tensor) -> None:
    """Add a block's outputs to those of earlier blocks, in place, weighted by the sums of exponentiated scores."""
    both = torch.logaddexp(sums, of_more)
    output.mul_((sums - both).exp_().unsqueeze(-1)).add_(more * (of_more - both).exp_().unsqueeze(-1))
    sums.copy_(both)


class _Gathered:
    """Gradients of the keys and values of all ranks, which a reduce-scatter sums."""

    def __init__(self, axis: SequenceAxis, own: Tensor, dtype: torch.dtype) -> None:
        self.axis = axis
        self.every = torch.zeros((axis.size, *own.shape), dtype=dtype, device=own.device)

    def add(self, block: Block, of_pair: list[Tensor], _: torch.dtype) -> None:
        """Add the gradients of a block's keys and values."""
        for whole, part in zip(self.every[block.source], of_pair, strict=True):
            whole[..., block.keys, :] += part

    def own(self) -> Tensor:
        """Return the summed gradients of the rank's own keys and values."""
        return self.axis.reduce_scatter(self.every)


class _InRing:
    """Gradients of keys and values that follow them around the ring, and end at their own rank."""

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis = axis
        self.arriving: Arriving | None = None

    def add(self, block: Block, of_pair: list[Tensor], dtype: torch.dtype) -> None:
        """Add the gradients of a block's keys and values to those that have arrived, and send them on."""
        if self.arriving is None:  # the first block is that of the own keys and values
            total = torch.stack(of_pair).to(dtype)
        else:
            total = self.arriving.wait()
            for whole, part in zip(total, of_pair, strict=True):
                whole[..., block.keys, :] += part
        self.arriving = self.axis.rotate(total)

    def own(self) -> Tensor:
        """Return the summed gradients of the rank's own keys and values."""
        assert self.arriving is not None
        return self.arriving.wait()


def _by_heads(part: Tensor, axis: SequenceAxis) -> Tensor:
    """Return ``(N, H / size, size T, d)`` of all ranks' tokens for ``(N, H, T, d)`` of the rank's own."""
    sent = part.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
    return axis.all_to_all(sent).movedim(0, 2).flatten(2, 3)


def _by_tokens(part: Tensor, axis: SequenceAxis) -> Tensor:
    """Return ``(N, H, T, d)`` of the rank's own tokens for ``(N, H / size, size T, d)`` of all ranks'."""
    sent = part.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()
    return axis.all_to_all(sent).movedim(0, 1).flatten(1, 2)
