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
from shardscope.spec.layout_optimizer import AnyStates, states_of
from shardscope.spec.optimizer import OptimizerStates
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
    optimizer: AnyStates = "adamw",
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
        optimizer: Its name, an `Optimizer`, or the `OptimizerStates` that it keeps.
        precision: A key of `RECIPES`, or an alias.
        num_tensors: Parameter tensors whose step counters this rank holds; the paper counts none.
        num_factors: Rows and columns of all matrices, for optimizers such as Adafactor.
        num_aside: Elements of embeddings, the output projection and vectors, for optimizers such as Muon.
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
        raise SpecError(f"zero_stage={zero_stage!r} is not a ZeRO stage; use 0, 1, 2 or 3")
    recipe, whole, kept = known_recipe(precision), np.asarray(num_params, float), states_of(optimizer)
    states = ModelStates(
        parameters=recipe.parameter * whole,
        gradients=(gradient_bytes or recipe.gradient) * whole,
        optimizer=optimizer_bytes(kept, recipe, whole, aside=num_aside, factors=num_factors),
    )
    parts = partitioned(states, stage=stage, ranks=np.asarray(data_parallel))
    counters = kept.counter_bytes * np.asarray(num_tensors)
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
    if precision not in RECIPES:
        precision = full_name(precision)
    if precision not in RECIPES:
        raise unknown_name("precision", precision, RECIPES)
    return RECIPES[precision]


def optimizer_bytes(
    kept: OptimizerStates, recipe: Recipe, elements: Floats, *, aside: npt.ArrayLike, factors: npt.ArrayLike
) -> Floats:
    """Bytes that an optimizer keeps of `elements` parameters, with the master copy and without step counters.

    Args:
        kept: What it keeps.
        recipe: Of the precision.
        elements: Parameters.
        aside: Of them, those of embeddings, the output projection and vectors.
        factors: Rows and columns of their matrices.
    """
    width = kept.element_bytes or recipe.state
    found: Floats = (recipe.master + kept.bytes_per_param(recipe.state)) * elements
    if kept.outside_hidden:
        found = found + kept.outside_hidden * width * np.asarray(aside, float)
    if kept.per_factor:
        found = found + kept.per_factor * width * np.asarray(factors, float)
    return found


def model_state_bytes(
    num_params: npt.ArrayLike,
    *,
    zero_stage: npt.ArrayLike = 0,
    data_parallel: npt.ArrayLike = 1,
    optimizer: AnyStates = "adamw",
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
