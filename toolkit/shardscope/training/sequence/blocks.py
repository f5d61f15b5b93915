"""Attention of a block of queries to a block of keys and values, with what it takes to merge several such blocks.

The output of softmax attention to several blocks of keys is the mean of the outputs for each, weighted by the sums of
their exponentiated scores. Each block therefore returns the logarithms of these sums (log-sum-exp), and backward passes
of blocks take those of all keys (Dao et al., arXiv 2205.14135, section 3.1; Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - returns the log-sum-exp
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class Block(NamedTuple):
    """A part of the attention of a rank's queries: which of them attend to which keys and values of a rank."""

    source: int
    """Rank that has the keys and values."""
    queries: slice
    keys: slice
    is_causal: bool = False
    """Whether a query attends only to the keys up to its own place, of equally many."""


def blocks_of(rank: int, size: int, length: int, *, is_causal: bool) -> list[Block]:
    """Return the blocks of a rank's attention, one for each rank from its own backwards.

    For causal attention, sequences are cut into 2 x size parts, of which rank r has parts r and 2 size - 1 - r, so that
    all ranks compute equally many scores (called zig-zag, or striped in halves): own keys causally, those of an earlier
    rank's first part with all queries, and all keys of a later rank with the queries of the second part.

    Args:
        rank: The rank.
        size: Number of ranks.
        length: Number of tokens of a sequence on one rank.
        is_causal: Whether a token attends only to itself and earlier ones.

    Example:
        >>> [tuple(block.source for block in blocks_of(rank, 3, 8, is_causal=True)) for rank in range(2)]
        [(0, 2, 1), (1, 0, 2)]
    """
    every, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    found = [Block(rank, every, every, is_causal)]
    for source in ((rank - step) % size for step in range(1, size)):
        if not is_causal:
            found.append(Block(source, every, every))
        elif source < rank:
            found.append(Block(source, every, first))
        else:
            found.append(Block(source, second, every))
    return found


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``(N, H, T, d)`` of attention and the log-sum-exp ``(N, H, T)`` of the scores.

    Args:
        query: Queries ``(N, H, T, d)``.
        key: Keys ``(N, H / g, S, d)``, each of which g heads share.
        value: Values, of the shape of the keys.
        is_causal: Whether query t attends only to keys up to t.
        scale: Factor of the scores.
    """
    key, value = _for_all_heads(query, key, value)
    if _is_on_cpu(query):
        found: tuple[Tensor, Tensor] = _FLASH(query, key, value, 0.0, is_causal, scale=scale)
        return found
    scores = _scores(query, key, is_causal=is_causal, scale=scale)
    sums = scores.logsumexp(-1)
    return (scores.sub_(sums.unsqueeze(-1)).exp_() @ value.to(scores.dtype)).to(query.dtype), sums


def attend_backward(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of one block.

    Args:
        gradient: Gradient of the outputs over all blocks.
        inputs: Queries, keys and values of the block.
        outputs: Outputs of the queries over all blocks, and the log-sum-exp of their scores.
        is_causal: As in `attend`.
        scale: As in `attend`.
    """
    (query, key, value), (output, sums) = inputs, outputs
    shape = key.shape
    key, value = _for_all_heads(query, key, value)
    if _is_on_cpu(query):
        of_query, of_key, of_value = _FLASH_BACKWARD(
            gradient, query, key, value, output, sums, 0.0, is_causal, scale=scale
        )
    else:
        scores = _scores(query, key, is_causal=is_causal, scale=scale)
        weights = scores.sub_(sums.unsqueeze(-1)).exp_()
        wide = gradient.to(weights.dtype)
        of_value = weights.mT @ wide
        of_scores = wide @ value.to(weights.dtype).mT
        of_scores.sub_((wide * output).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        of_query, of_key = of_scores @ key.to(weights.dtype), of_scores.mT @ query.to(weights.dtype)
    if of_key.shape != shape:
        of_key, of_value = (each.unflatten(1, (shape[1], -1)).sum(2) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _is_on_cpu(tensor: Tensor) -> bool:
    """Return whether torch's attention on CPUs computes a block, which stores no scores."""
    return tensor.device.type == "cpu"


def _for_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values repeated for each head that shares them."""
    shared = query.shape[1] // key.shape[1]
    if shared == 1:
        return key, value
    return key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)


def _scores(query: Tensor, key: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    """Return scaled scores ``(N, H, T, S)``, at least in fp32, with minus infinity where a query does not attend."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).mT).mul_(scale)
    if is_causal:
        late = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(late, -torch.inf)
    return scores
