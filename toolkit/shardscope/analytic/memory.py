"""Bytes of model states, by formula: parameters, gradients and optimizer state, whole or partitioned.

With Ψ parameters, p bytes each for them, g for their gradients and K for what the optimizer keeps of each, a rank holds
(p + g + K) Ψ. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3) partitions over N ranks the optimizer state,
then the gradients, then the parameters:

    stage 1    (p + g) Ψ + K Ψ / N          the paper's 4Ψ + KΨ/N
    stage 2    p Ψ + (g + K) Ψ / N          2Ψ + (2+K)Ψ/N
    stage 3    (p + g + K) Ψ / N            (4+K)Ψ/N

`RECIPES` gives p, g and the bytes of a state and of a master copy for each precision. Shardscope's own ``fp32``,
``bf16`` and ``fp16`` keep weights, gradients and states in 4 bytes (the short formats are autocast); ``fp16-mixed`` and
``bf16-mixed`` are the paper's: weights and gradients in 2 bytes, and a master copy of the weights among the states.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError, unknown_name

Floats = npt.NDArray[np.float64]


class Recipe(NamedTuple):
    """Bytes of one element by what it is for."""

    parameter: int
    gradient: int
    state: int
    master: int
    """Of a copy of the weights that the optimizer updates; 0 where it updates the weights themselves."""


RECIPES: MappingProxyType[str, Recipe] = MappingProxyType(
    {
        "fp32": Recipe(4, 4, 4, 0),
        "fp64": Recipe(8, 8, 8, 0),
        "bf16": Recipe(4, 4, 4, 0),
        "fp16": Recipe(4, 4, 4, 0),
        "fp16-mixed": Recipe(2, 2, 4, 4),
        "bf16-mixed": Recipe(2, 2, 4, 4),
    }
)
"""Every precision there is a formula for."""

STATES: MappingProxyType[str, int] = MappingProxyType(
    {"sgd": 0, "nesterov": 1, "lars": 1, "adamw": 2, "lamb": 2}
)
"""Tensors like its parameter that each optimizer keeps: momentum, or both moments. SGD is the one without momentum."""

STEP_COUNTER_BYTES: MappingProxyType[str, int] = MappingProxyType(
    {"sgd": 0, "nesterov": 0, "lars": 0, "adamw": 4, "lamb": 4}
)
"""The float32 step counter that AdamW and LAMB keep of each parameter tensor, however large it is."""


class ModelStates(NamedTuple):
    """Bytes a rank, term by term."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats

    @property
    def total(self) -> Floats:
        """All three."""
        return np.asarray(self.parameters + self.gradients + self.optimizer)


def model_states(
    num_params: npt.ArrayLike,
    *,
    zero_stage: npt.ArrayLike = 0,
    data_parallel: npt.ArrayLike = 1,
    optimizer: str = "adamw",
    precision: str = "fp32",
    num_tensors: npt.ArrayLike = 0,
) -> ModelStates:
    """Bytes that one rank holds for parameters, gradients and optimizer state.

    Shards are taken to be even; what a strategy pads them with, or how unevenly it cuts, comes on top.

    Args:
        num_params: Ψ, elements of all parameters.
        zero_stage: 0 partitions nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.
        data_parallel: N, the ranks that partition.
        optimizer: A key of `STATES`.
        precision: A key of `RECIPES`.
        num_tensors: Parameter tensors whose step counters this rank holds; the paper counts none.

    Raises:
        SpecError: An unknown optimizer or precision, or a stage that is not 0 to 3.

    Example:
        >>> states = model_states(7.5e9, zero_stage=1, data_parallel=64, precision="fp16-mixed")
        >>> [round(float(part) / 1e9, 2) for part in states]
        [15.0, 15.0, 1.41]
    """
    if optimizer not in STATES:
        raise unknown_name("optimizer", optimizer, STATES)
    if precision not in RECIPES:
        raise unknown_name("precision", precision, RECIPES)
    stage = np.asarray(zero_stage)
    if not np.isin(stage, (0, 1, 2, 3)).all():
        raise SpecError(f"zero_stage={zero_stage!r} is none of the stages; use 0, 1, 2 or 3")
    recipe = RECIPES[precision]
    whole, shard = np.asarray(num_params, float), np.asarray(num_params, float) / np.asarray(data_parallel)
    parameters = recipe.parameter * np.where(stage >= 3, shard, whole)
    gradients = recipe.gradient * np.where(stage >= 2, shard, whole)
    per_param = recipe.master + recipe.state * STATES[optimizer]
    counters = STEP_COUNTER_BYTES[optimizer] * np.asarray(num_tensors)
    return ModelStates(parameters, gradients, per_param * np.where(stage >= 1, shard, whole) + counters)


def model_state_bytes(
    num_params: npt.ArrayLike,
    *,
    zero_stage: npt.ArrayLike = 0,
    data_parallel: npt.ArrayLike = 1,
    optimizer: str = "adamw",
    precision: str = "fp32",
    num_tensors: npt.ArrayLike = 0,
) -> Floats:
    """Bytes that one rank holds as model states; arguments as for `model_states`, arrays broadcast.

    Example:
        >>> float(model_state_bytes(7.5e9, zero_stage=[0, 2], data_parallel=64, precision="fp16-mixed")[0])
        120000000000.0
    """
    return model_states(
        num_params, zero_stage=zero_stage, data_parallel=data_parallel, optimizer=optimizer, precision=precision,
        num_tensors=num_tensors,
    ).total  # fmt: skip
