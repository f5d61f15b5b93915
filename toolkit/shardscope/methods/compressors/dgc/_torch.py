"""Deep Gradient Compression (Lin et al. 2018): top-k with momentum correction.

Error feedback delays small gradients by many steps, and the optimizer's momentum then weights them wrongly. Each rank
therefore applies momentum itself, before it selects the elements to send (momentum correction, section 3.2). The
momentum of elements that have just been sent is set to zero, so that stale gradients have no further effect (momentum
factor masking, section 3.3). With the momentum buffer u and the residual v, a step is

    u = momentum * u + clipped gradient;    v = v + u;    send the largest of v;    u, v = 0 where sent

The job's optimizer must not use momentum. Each tensor's gradient is clipped separately, as in the authors' code,
because buckets are sent during the backward pass, when the global norm is not yet known.
"""

from __future__ import annotations

import math

from torch import Tensor

from shardscope.training.compression.bucket import Bucket, BucketState
from shardscope.training.compression.memory import Memory


class MomentumCorrection(Memory):
    """Momentum buffer and residual of one rank.

    Args:
        momentum: Decay of the momentum per step; 0 means plain error feedback.
        max_norm: Norm at which each tensor's gradient is clipped on this rank; None for no clipping.
    """

    is_needed = True

    def __init__(self, momentum: float, max_norm: float | None = None) -> None:
        self.momentum, self.max_norm = momentum, max_norm
        self.velocity, self.unsent = BucketState(), BucketState()

    def before(self, bucket: Bucket) -> Tensor:
        gradient = self._clipped(bucket)
        unsent = self.unsent.of(bucket)
        if self.momentum:
            gradient = self.velocity.of(bucket).mul_(self.momentum).add_(gradient)
        self.note(bucket.names, bucket.sizes, gradient)
        return unsent.add_(gradient)

    def _clipped(self, bucket: Bucket) -> Tensor:
        if self.max_norm is None:
            return bucket.flat
        flat = bucket.flat.clone()
        for view in bucket.views(flat).values():
            norm = float(view.norm())
            if norm > self.max_norm:
                view.mul_(self.max_norm / norm)
        return flat

    def after(self, bucket: Bucket, values: Tensor, back: Tensor) -> None:
        values.sub_(back)
        if self.momentum:
            self.velocity.of(bucket).masked_fill_(back != 0, 0.0)

    @property
    def kept(self) -> dict[str, BucketState]:
        return {"unsent": self.unsent, **({"velocity": self.velocity} if self.momentum else {})}

    @property
    def residuals(self) -> dict[str, BucketState]:
        return {"unsent": self.unsent}


def local_max_norm(clip: float | str, num_ranks: int) -> float | None:
    """Return the norm at which each rank clips its own gradient; None for no clipping.

    The norm of a sum of independent gradients grows with the square root of their number.

    Args:
        clip: Clipping norm for the gradient over all ranks, or ``off``.
        num_ranks: Number of ranks.
    """
    return None if isinstance(clip, str) else clip / math.sqrt(num_ranks)
