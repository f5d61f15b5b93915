"""Deep Gradient Compression (Lin et al. 2018): what top-k leaves out comes later, and with the momentum it missed.

Error feedback delays small gradients by many steps, and the optimizer's momentum then weighs them wrongly. So the
momentum is kept on each rank before anything is left out (momentum correction, section 3.2), and forgotten where an
element has just been sent, which keeps stale gradients from pushing on (momentum factor masking, section 3.3):

    u = momentum * u + clipped gradient;    v = v + u;    send the largest of v;    u, v = 0 where sent

The optimizer of the job adds no momentum of its own. Each tensor's gradient is clipped by itself, as in the authors'
code: a bucket leaves while the backward pass still works on the others, so the norm of all is not known then.
"""

from __future__ import annotations

import math

from torch import Tensor

from shardscope.training.compression.bucket import Bucket, Kept
from shardscope.training.compression.memory import Memory


class MomentumCorrection(Memory):
    """Momentum and what has not been sent of it, on one rank.

    Args:
        momentum: Its decay a step; 0 makes this plain error feedback.
        max_norm: Of each tensor's gradient on this rank, or None for no clipping.
    """

    is_needed = True

    def __init__(self, momentum: float, max_norm: float | None = None) -> None:
        self.momentum, self.max_norm = momentum, max_norm
        self.velocity, self.unsent = Kept(), Kept()

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
    def kept(self) -> dict[str, Kept]:
        return {"unsent": self.unsent, **({"velocity": self.velocity} if self.momentum else {})}

    @property
    def owed(self) -> dict[str, Kept]:
        return {"unsent": self.unsent}


def local_max_norm(clip: float | str, num_ranks: int) -> float | None:
    """The norm at which a rank clips its own gradient: independent ones add up by the root of their number."""
    return None if isinstance(clip, str) else clip / math.sqrt(num_ranks)
