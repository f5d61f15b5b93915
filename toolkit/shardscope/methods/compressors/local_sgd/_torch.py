"""Local SGD: each rank trains independently, and every few steps the ranks average their parameters.

Stich 2019 (arXiv 1805.09767), McMahan et al. 2017 (federated averaging). The parameters are sent uncompressed in every
`every`-th step. With ``every=1`` and plain SGD, local SGD is equivalent to averaging gradients, because the mean of
``w - lr g_i`` is ``w - lr`` times the mean of ``g_i``. If gradients are clipped, each rank clips by its own norm.

Momentum buffers and Adam's moments are not averaged, so with them, ``every=1`` is not equivalent to averaging
gradients. They are part of each rank's state_dict, as are the rank's parameters between two averagings. An evaluation
or a checkpoint between two averagings uses the mean of the parameters, but the ranks then continue from their own
parameters, so the evaluation does not change the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, check_finite
from shardscope.training.flat import copy_tensors_, views_of
from shardscope.training.observe import StandIns

_OWN = "parameter"
"""Key of a rank's own parameters in the state_dict; no optimizer uses this name for its state."""


class LocalSGD(Compressor):
    """Compressor that implements local SGD on one rank.

    Args:
        name: Name of the method, for error messages.
        every: Number of steps from one averaging of the parameters to the next.
    """

    def __init__(self, name: str, every: int) -> None:
        self.name, self.every = name, every
        self._is_apart = False
        self._drift = 0.0
        self._restored: dict[str, Tensor] = {}

    def attach(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = dict(parameters)

    def begin_step(self, step: int) -> None:
        self._restore()

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        check_finite(bucket, self.name, in_float32=False)

    def after_step(self, parameters: Sequence[nn.Parameter], carrier: Carrier, step: int) -> None:
        self._is_apart = step % self.every != 0
        if self._is_apart:
            return
        own, mean = _own_and_mean(parameters, carrier)
        copy_tensors_(parameters, views_of(mean, parameters))
        self._drift = float((own - mean).norm() / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny))

    def averaged(self, carrier: Carrier) -> StandIns:
        if not self._is_apart:
            return {}
        parameters = [p for p in self._parameters.values() if p.requires_grad]
        means = views_of(_own_and_mean(parameters, carrier)[1], parameters)
        return {p: mean.to(p.device) for p, mean in zip(parameters, means, strict=True)}

    @property
    def figures(self) -> dict[str, float]:
        """Distance of this rank's parameters from the mean, before the last averaging, relative to the mean's norm."""
        return {"drift": self._drift}

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's optimizer state, and its parameters if they currently differ between ranks."""
        moments = {
            f"{key}.{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        own = {f"{_OWN}.{name}": p.detach() for name, p in self._parameters.items() if self._is_apart}
        return {
            **moments,
            **own,
            **self._restored,
        }  # loaded values that have not been restored yet take precedence

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Store a state_dict; the next step restores it, after the rest of the checkpoint has been loaded."""
        self._restored = dict(state)
        self._is_apart = any(place.startswith(f"{_OWN}.") for place in state)

    def _restore(self) -> None:
        """Overwrite the state loaded from a checkpoint, which is the same on all ranks, with this rank's own state."""
        for place, saved in self._restored.items():
            key, name = place.split(".", 1)
            parameter = self._parameters[name]
            if key == _OWN:
                parameter.data.copy_(saved)
                continue
            state = self._optimizer.state[parameter]
            if key in state:
                state[key].copy_(saved)
            else:
                state[key] = saved.clone()
        self._restored = {}


def _own_and_mean(parameters: Sequence[nn.Parameter], carrier: Carrier) -> tuple[Tensor, Tensor]:
    """Return this rank's parameters, and their mean over all ranks, as flat tensors in CPU memory."""
    own = torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).cpu()
    return own, carrier.sum_(own / carrier.world_size)
