"""Bytes of model states, by formula: parameters, gradients and optimizer state, whole or partitioned.

With Ψ parameters, p bytes each for them, g for their gradients and K for what the optimizer keeps of each, a rank holds
(p + g + K) Ψ. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3) partitions over N ranks the optimizer state,
then the gradients, then the parameters:

    stage 1    (p + g) Ψ + K Ψ / N          the paper's 4Ψ + KΨ/N
    stage 2    p Ψ + (g + K) Ψ / N          2Ψ + (2+K)Ψ/N
    stage 3    (p + g + K) Ψ / N            (4+K)Ψ/N

`RECIPES` gives p, g and the bytes of a state and of a master copy for each precision. ``fp32``,
``bf16-autocast`` and ``fp16-autocast`` keep weights, gradients and states in 4 bytes, as Shardscope's own jobs do;
``fp16-mixed`` and ``bf16-mixed`` are the paper's: weights and gradients in 2 bytes, and a master copy of the weights
among the states; ``fp8-mixed`` is TransformerEngine's: the same, and two copies of each weight in 1 byte for the matrix
products. ``bf16`` and ``fp16`` are aliases of the mixed ones.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError, unknown_name
from shardscope.spec.precision import full_name

Floats = npt.NDArray[np.float64]


class Recipe(NamedTuple):
    """Bytes of one element by what it is for."""

    parameter: int
    gradient: int
    state: int
    master: int
    """Of a copy of the weights that the optimizer updates; 0 where it updates the weights themselves."""
    activation: int = 4
    """Of a saved activation."""
    product: int = 4
    """Of a saved input of a matrix product."""
    copies: int = 0
    """Of short copies of a weight: autocast's, or TransformerEngine's fp8 weight and its transpose (2.x)."""


RECIPES: MappingProxyType[str, Recipe] = MappingProxyType(
    {
        "fp32": Recipe(4, 4, 4, 0),
        "fp64": Recipe(8, 8, 8, 0, 8, 8),
        "bf16-autocast": Recipe(4, 4, 4, 0, 2, 2, copies=2),
        "fp16-autocast": Recipe(4, 4, 4, 0, 2, 2, copies=2),
        "fp16-mixed": Recipe(2, 2, 4, 4, 2, 2),
        "bf16-mixed": Recipe(2, 2, 4, 4, 2, 2),
        "fp8-mixed": Recipe(2, 2, 4, 4, 2, 1, copies=2),
    }
)
"""Every precision there is a formula for."""

STATES: MappingProxyType[str, int] = MappingProxyType(
    {
        "sgd": 0, "nesterov": 1, "lars": 1, "adamw": 2, "lamb": 2, "adafactor": 0, "adam8bit": 2, "muon": 1,
        "onebit-adam": 2, "onebit-lamb": 3,
    }
)  # fmt: skip
"""Tensors like its parameter that each optimizer keeps: momentum, or both moments. SGD is the one without momentum;
Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, section 4, without momentum) keeps sums of rows and columns only;
Muon (Jordan et al. 2024) has one momentum for hidden matrices and leaves the rest to AdamW. The last two are AdamW and
LAMB in jobs with the compressions of these names: 1-bit LAMB (Li et al. 2021, arXiv 2104.06069, Algorithm 1) keeps a
fresh second moment beside the frozen one. What the compression itself remembers comes on top."""

STEP_COUNTER_BYTES: MappingProxyType[str, int] = MappingProxyType(
    {
        "sgd": 0, "nesterov": 0, "lars": 0, "adamw": 4, "lamb": 4, "adafactor": 0, "adam8bit": 0, "muon": 0,
        "onebit-adam": 4, "onebit-lamb": 12,
    }
)  # fmt: skip
"""The float32 step counter that AdamW and LAMB keep of each parameter tensor, however large it is; 1-bit LAMB also its
averaged trust ratio and the factor on that."""

BLOCK_8BIT = 256
"""Elements that share a float32 scale in bitsandbytes' 8-bit states today (2,048 in Dettmers et al. 2022, arXiv
2110.02861). Tensors of fewer than 4,096 elements stay in 4 bytes there, which is left out."""


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
    num_factors: npt.ArrayLike = 0,
    num_aside: npt.ArrayLike = 0,
    gradient_bytes: int = 0,
) -> ModelStates:
    """Bytes that one rank holds for parameters, gradients and optimizer state.

    Shards are taken to be even; what a strategy pads them with, or how unevenly it cuts, comes on top.

    Args:
        num_params: Ψ, elements of all parameters.
        zero_stage: 0 partitions nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.
        data_parallel: N, the ranks that partition.
        optimizer: A key of `STATES`.
        precision: A key of `RECIPES`, or an alias.
        num_tensors: Parameter tensors whose step counters (and 1-bit LAMB's ratios) this rank holds; the paper counts
            none.
        num_factors: Rows and columns of all matrices, which Adafactor keeps a sum of each.
        num_aside: Of the parameters, those that Muon leaves to AdamW: embeddings, the head, vectors.
        gradient_bytes: Of one gradient, where it is not the recipe's: 4 for Megatron's ``main_grad``.

    Raises:
        SpecError: An unknown optimizer or precision, or a stage that is not 0 to 3.

    Example:
        >>> states = model_states(7.5e9, zero_stage=1, data_parallel=64, precision="fp16-mixed")
        >>> [round(float(part) / 1e9, 2) for part in states]
        [15.0, 15.0, 1.41]
    """
    stage = np.asarray(zero_stage)
    if not np.isin(stage, (0, 1, 2, 3)).all():
        raise SpecError(f"zero_stage={zero_stage!r} is none of the stages; use 0, 1, 2 or 3")
    recipe, whole = known_recipe(precision), np.asarray(num_params, float)
    kept = (recipe.master + state_bytes_per_param(optimizer, recipe.state)) * whole
    kept += recipe.state * (
        np.asarray(num_aside) * (optimizer == "muon") + factor_states(optimizer, num_factors)
    )
    gradients = (gradient_bytes or recipe.gradient) * whole
    states = ModelStates(recipe.parameter * whole, gradients, kept)
    parts = partitioned(states, stage=stage, ranks=np.asarray(data_parallel))
    counters = STEP_COUNTER_BYTES[optimizer] * np.asarray(num_tensors)
    return parts._replace(optimizer=parts.optimizer + counters)


def partitioned(whole: ModelStates, *, stage: npt.NDArray[np.int64], ranks: Floats) -> ModelStates:
    """What a rank holds of `whole` states: stage 1 divides the optimizer's, 2 gradients too, 3 parameters too."""
    part = 1 / ranks
    return ModelStates(
        whole.parameters * np.where(stage >= 3, part, 1.0),
        whole.gradients * np.where(stage >= 2, part, 1.0),
        whole.optimizer * np.where(stage >= 1, part, 1.0),
    )


def known_recipe(precision: str) -> Recipe:
    """The recipe of that name or alias; raises `SpecError` where there is none."""
    precision = full_name(precision)
    if precision not in RECIPES:
        raise unknown_name("precision", precision, RECIPES)
    return RECIPES[precision]


def state_bytes_per_param(optimizer: str, state_bytes: int = 4) -> float:
    """Bytes that an optimizer keeps of each parameter, without a master copy: 8 for AdamW in float32.

    Raises:
        SpecError: An unknown optimizer.
    """
    if optimizer not in STATES:
        raise unknown_name("optimizer", optimizer, STATES)
    return STATES[optimizer] * (1 + 4 / BLOCK_8BIT if optimizer == "adam8bit" else state_bytes)


def factor_states(optimizer: str, num_factors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Elements that Adafactor keeps for matrices of `num_factors` rows and columns together; 0 for any other."""
    return np.asarray(num_factors, float) * (optimizer == "adafactor")


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
