"""1-bit Adam and 1-bit LAMB: after a warm-up, first moments are exchanged instead of gradients, one bit per element.

During the warm-up, gradients are averaged uncompressed. Then the second moment is frozen, which makes the rest of the
optimizer linear in the gradient, so error feedback can compensate for the compression. Each rank computes the first
moment that results from its own gradient. The ranks average these moments in two phases, with error feedback in both,
and the optimizer (`optim.frozen`) uses the mean. Sources: Tang et al. 2021 (arXiv 2102.02888), Li et al. 2021 (arXiv
2104.06069).

All elements of a block share one magnitude, but moments differ between layers by orders of magnitude. So moments are
scaled before they are packed: each is divided by the root mean square of its layer's moments at the time of the freeze
(1-bit LAMB, section 4.2; the authors' code of 1-bit Adam packs layer by layer instead). Elements whose gradient was
always zero before the freeze are not updated, because one bit cannot encode zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardscope.training.compression.bucket import Bucket, BucketState
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.compressor import Carrier, check_finite
from shardscope.training.compression.memory import ErrorFeedback
from shardscope.training.compression.packed import Packed
from shardscope.training.optim.frozen import FrozenVariance

_SCALE, _FROZEN = "scale.", "frozen_after"


class OneBit(Packed):
    """Compressor that implements 1-bit Adam and 1-bit LAMB on one rank.

    Args:
        name: Name of the method, for error messages.
        codec: Codec of the first moments.
        warmup_steps: Number of steps before the second moment is frozen.
    """

    freezes_variance = True

    def __init__(self, name: str, codec: Codec, warmup_steps: int) -> None:
        self._residual = ErrorFeedback()
        super().__init__(name, codec, memory=self._residual, shares=ErrorFeedback("share"))
        self.warmup_steps = warmup_steps
        self._frozen_after: int | None = None  # set before the first step if an earlier run has frozen it
        self._units = BucketState()
        self._scales: dict[str, Tensor] = {}

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        assert isinstance(optimizer, FrozenVariance)
        self._optimizer = optimizer
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if step > self.warmup_steps and self._optimizer.frozen_after is None:
            self._freeze(step - 1)

    def warmup_ends(self, after: int) -> int | None:
        return max(self.warmup_steps, after) if self._frozen_after is None else self._frozen_after

    def _freeze(self, last_step: int) -> None:
        if self._frozen_after is None:
            self._frozen_after, self._scales = last_step, self._measure()
        self._optimizer.freeze(self._frozen_after)
        self._units.load_state_dict(
            {name: self._optimizer.used(p).cpu() * self._scales[name] for name, p in self._parameters.items()}
        )

    def _measure(self) -> dict[str, Tensor]:
        """Return each layer's root mean square first moment, relative to the mean over layers; 1 for zero moments."""
        moments = {name: self._optimizer.first_moment(p) for name, p in self._parameters.items()}
        sizes = {name: moment.double().square().mean().sqrt().cpu() for name, moment in moments.items()}
        mean = torch.stack(list(sizes.values())).mean()
        return {name: torch.where(size > 0, size / mean, 1.0).float() for name, size in sizes.items()}

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        check_finite(bucket, self.name)
        if self._optimizer.frozen_after is None:
            carrier.sum_(bucket.flat.div_(carrier.world_size))
            return
        with carrier.meter.span("codec", "moment"):
            units = self._units.of(bucket)
            unused = units == 0
            self._advance(bucket)
            bucket.flat.div_(units).masked_fill_(unused, 0.0)
        super().mean_(bucket, carrier)
        with carrier.meter.span("codec", "moment"):
            bucket.flat.mul_(units)
            self._residual.residual.of(bucket).masked_fill_(unused, 0.0)

    def _advance(self, bucket: Bucket) -> None:
        """Replace the bucket's gradients with the first moments that result from them."""
        for name, grad in bucket.views(bucket.flat).items():
            self._optimizer.advance_(self._parameters[name], grad)

    @property
    def work_space(self) -> list[Tensor]:
        return [*super().work_space, *self._units.tensors]

    def state_dict(self) -> dict[str, Tensor]:
        scales = {f"{_SCALE}{name}": scale for name, scale in self._scales.items()}
        frozen = {} if self._frozen_after is None else {_FROZEN: torch.tensor(self._frozen_after)}
        return {**super().state_dict(), **scales, **frozen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._scales = {
            key.removeprefix(_SCALE): scale.clone() for key, scale in state.items() if key.startswith(_SCALE)
        }
        if self._scales:  # a frozen second moment stays frozen, regardless of the current warm-up
            self._frozen_after = int(state.get(_FROZEN, self.warmup_steps))
            self.warmup_steps = min(self.warmup_steps, self._frozen_after)
