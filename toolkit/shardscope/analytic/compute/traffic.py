"""Bytes that a block moves through a device's memory outside its matrix products, forward.

Counted as each operator reads and writes them, in the operators' order of Korthikanti et al. 2022 (arXiv 2205.05198,
section 4.1) with elements of 2 bytes and masks of 1: two norms (read and write), two residual additions with dropout
(read two, write one, mask), the activation function, and attention's softmax and dropout over a s^2 scores where these
are not fused into one kernel. The backward pass moves twice as much.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute.matmul import Split, key_value_width
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

WHOLE_BYTES = 2 * 4 + 2 * 7
"""A token and hidden element: two norms (read 2, write 2), two additions (read 2 x 2, write 2, mask 1)."""

SCORE_BYTES = 13
"""A score: written 2, softmax reads 2 and writes 2, dropout reads 2, writes 2 and a mask of 1, the product reads 2."""

LOGIT_BYTES = 20
"""A logit, both passes: written and read in 2, cast to 4, maximum, exponential, sum and gradient over 4-byte values."""


def block_bytes(model: Transformer, split: Split, *, sequence_parallel: npt.ArrayLike) -> Floats:
    """What norms, additions, activation function and rotation move, without attention's scores."""
    tokens = split.tokens(model.seq)
    whole = WHOLE_BYTES * model.hidden / np.where(np.asarray(sequence_parallel), split.tensor, 1.0)
    heads = model.heads * model.head_size / split.tensor + key_value_width(model, split)
    return np.asarray(tokens * (whole + 4.0 * heads))


def activation_bytes(model: Transformer, split: Split, width: float) -> Floats:
    """What the activation function of a feed-forward layer of inner width `width` reads and writes."""
    return np.asarray(split.tokens(model.seq) * (6.0 if model.gated else 4.0) * width / split.tensor)


def routing_bytes(model: Transformer, split: Split) -> Floats:
    """What sorting tokens to experts and back moves: a read and a write each way of every visit."""
    assert model.mixture is not None
    return np.asarray(split.tokens(model.seq) * model.mixture.active * 8.0 * model.hidden)


def score_bytes(model: Transformer, split: Split) -> Floats:
    """What softmax and dropout move where attention is not one fused kernel."""
    return np.asarray(SCORE_BYTES * split.tokens(model.seq) * model.seq * model.heads / split.tensor)


def logit_bytes(model: Transformer, split: Split) -> Floats:
    """What the cross-entropy moves over both passes."""
    return np.asarray(LOGIT_BYTES * split.tokens(model.seq) * model.vocab / split.tensor)
