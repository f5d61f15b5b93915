"""The first phase of LAMB in one compiled loop: moments, update and both sums of squares, in one pass over memory.

torch needs four operations for this phase. On shards that do not fit in the cache, each operation reads memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from shardscope.training.compression.route import choose_route, compiled, share_out
from shardscope.training.optim._kernels import AdamMoments

BLOCK = 1024
"""Number of elements whose squares are summed in float32; the sums of blocks are added in float64. The block size, and
so the result, does not depend on the number of threads."""
_BLOCKS_PER_THREAD = 256

# A compiler may use vector instructions for a sum only if it may change its order, and fused multiply-adds only if it
# may leave out a rounding. Only the sign of a zero may change; NaN and infinities keep their meaning.
_RELAXED = frozenset({"reassoc", "contract", "nsz"})


def _advance(  # noqa: PLR0917 - signature that `share_out` needs
    weights: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, updates: Any, factors: Any, squares: Any, first: int,
    stop: int,
) -> None:  # fmt: skip
    """Update the moments, and write the negative updates and the sums of squares, for blocks `first` to `stop`.

    All arrays are float32. `factors` are those of `factors_of`; row 0 of `squares` is for the weights, row 1 for the
    updates, with one column per block.
    """
    keep1, add1, keep2, add2, scale1, scale2, eps, decay, grad_factor = factors
    for block in range(first, stop):
        start = block * BLOCK
        end = min(start + BLOCK, weights.shape[0])
        w, g, m, v = weights[start:end], grads[start:end], exp_avgs[start:end], exp_avg_sqs[start:end]
        u = updates[start:end]
        weight_square, update_square = np.float32(0), np.float32(0)
        for i in range(len(w)):
            grad = g[i] * grad_factor
            moment = keep1 * m[i] + add1 * grad
            square = keep2 * v[i] + add2 * grad * grad
            update = -(moment * scale1) / (np.sqrt(square) * scale2 + eps)
            if decay != 0:  # 0 times an infinite weight is NaN
                update -= decay * w[i]
            m[i] = moment
            v[i] = square
            u[i] = update
            weight_square += w[i] * w[i]
            update_square += update * update
        squares[0, block], squares[1, block] = weight_square, update_square


Advance = Callable[..., None]


@cache
def compiled_advance() -> Advance:
    """Return `_advance`, compiled on its first call."""
    return compiled(_advance, fastmath=_RELAXED)


def chosen_loop() -> Advance | None:
    """Return the loop for `advance_layer_`; None if numba is not installed or turned off (see `choose_route`)."""
    return compiled_advance() if choose_route() == "numba" else None


def factors_of(moments: AdamMoments, count: float, decay: float, grad_factor: float) -> Any:
    """Return the loop's factors, as a tuple of float32 numbers.

    Args:
        moments: Settings of the moments.
        count: The layer's step count for the bias correction, from `AdamMoments.counts`.
        decay: Weight decay that is part of the update.
        grad_factor: Factor of the gradients.
    """
    beta1, beta2 = moments.betas
    weight = 1 - beta1 if moments.grad_averaging else 1.0
    first, second = 1 / (1 - beta1**count), 1 / (1 - beta2**count) ** 0.5
    values = (beta1, weight, beta2, 1 - beta2, first, second, moments.eps, decay, grad_factor)
    return tuple(map(np.float32, values))


def advance_layer_(advance: Advance, tensors: Sequence[Tensor], factors: Any) -> tuple[float, float]:
    """Run the loop for a layer; return the sums of squares of its weights and of its update.

    Args:
        advance: The compiled loop.
        tensors: Weights, gradient, first and second moment, and the output for the negative update; flat, float32.
        factors: From `factors_of`.
    """
    num_blocks = -(-tensors[0].numel() // BLOCK)
    squares = np.empty((2, num_blocks), np.float32)
    arrays = [tensor.numpy() for tensor in tensors]
    share_out(advance, (*arrays, factors, squares), count=num_blocks, at_least=_BLOCKS_PER_THREAD)
    of_weights, of_update = squares.sum(axis=1, dtype=np.float64).tolist()
    return of_weights, of_update
