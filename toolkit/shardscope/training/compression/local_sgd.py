"""Local SGD: each rank trains by itself, and every so many steps the ranks average their parameters.

Stich 2019 (arXiv 1805.09767), McMahan et al. 2017 (federated averaging). What crosses the wire is the parameters,
uncompressed, one step in `every`. With ``every=1`` and plain SGD it is the run that averages gradients: the mean of
``w - lr g_i`` is ``w - lr`` times the mean of ``g_i``. Clipping is by each rank's own norm.

Momentum and Adam's moments stay on their rank and are not averaged, so with them ``every=1`` is another method. They
are part of what this rank must find again after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, refuse_not_finite
from shardscope.training.flat import copy_tensors_, views_of


class LocalSGD(Compressor):
    """One rank's side.

    Args:
        name: Of the method, for errors.
        every: Steps between two averages.
    """

    def __init__(self, name: str, every: int) -> None:
        self.name, self.every = name, every
        self._steps_apart = 0
        self._drift = 0.0
        self._restored: dict[str, Tensor] = {}

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = dict(parameters)

    def begin_step(self, step: int) -> None:  # noqa: ARG002
        self._restore()

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:  # noqa: ARG002
        refuse_not_finite(bucket, self.name, in_float32=False)

    def after_step(self, parameters: Sequence[nn.Parameter], carrier: Carrier, step: int) -> None:
        self._steps_apart += 1
        if step % self.every == 0:
            self.settle(parameters, carrier)

    def settle(self, parameters: Sequence[nn.Parameter], carrier: Carrier) -> None:
        """Average the parameters, unless no step has been taken since they were."""
        if not self._steps_apart:
            return
        self._steps_apart = 0
        own = torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).cpu()
        mean = carrier.sum_(own / carrier.world_size)
        copy_tensors_(parameters, views_of(mean, parameters))
        self._drift = float((own - mean).norm() / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny))

    @property
    def figures(self) -> dict[str, float]:
        """How far this rank was from the mean when they last met, relative to it."""
        return {"drift": self._drift}

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's moments; at a checkpoint the parameters have just been averaged."""
        return {
            f"{key}.{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave; it takes effect in the next step, after whatever else is loaded."""
        self._restored = dict(state)

    def _restore(self) -> None:
        """Put loaded moments in the place of those that a checkpoint's optimizer holds, which are one rank's."""
        for place, saved in self._restored.items():
            key, name = place.split(".", 1)
            state = self._optimizer.state[self._parameters[name]]
            if key in state:
                state[key].copy_(saved)
            else:
                state[key] = saved.clone()
        self._restored = {}
