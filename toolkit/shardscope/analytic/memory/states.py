"""Bytes of model states, by formula: parameters, gradients and optimizer state, replicated or sharded by ZeRO.

A model has Ψ parameters, each with p bytes for its value, g bytes for its gradient and K bytes for its optimizer state.
Without sharding, a rank holds (p + g + K) Ψ bytes. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3) shards
over N ranks the optimizer state (stage 1), also the gradients (stage 2), or also the parameters (stage 3):

               bytes on a rank              in the paper, where p = g = 2
    stage 1    (p + g) Ψ + K Ψ / N          4Ψ + KΨ/N
    stage 2    p Ψ + (g + K) Ψ / N          2Ψ + (2+K)Ψ/N
    stage 3    (p + g + K) Ψ / N            (4+K)Ψ/N

For each precision, `RECIPES` gives p, g, and the bytes of a state element and of a master weight:

- ``fp32``, ``bf16-autocast`` and ``fp16-autocast`` have weights, gradients and states of 4 bytes, as in Shardscope's
  own jobs.
- ``fp16-mixed`` and ``bf16-mixed`` follow the paper: weights and gradients of 2 bytes, and a master copy of
  the weights as part of the optimizer state. ``fp16`` and ``bf16`` are aliases.
- ``fp8-mixed`` is TransformerEngine's, with one scale per tensor: like ``bf16-mixed``, but with two
  additional 1-byte copies of each weight for matrix products, which is one copy where the device needs no
  transpose.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError, unknown_name
from shardscope.spec.job_parts import full_name
from shardscope.spec.layout_optimizer import AnyStates, states_of
from shardscope.spec.optimizer import OptimizerStates

Floats = npt.NDArray[np.float64]


class ElementBytes(NamedTuple):
    """Bytes of one element of each type of tensor, for one precision."""

    parameter: int
    gradient: int
    state: int
    master: int
    """Bytes of a master weight, which the optimizer updates; 0 if the optimizer updates the weights themselves."""
    activation: int = 4
    """Bytes of a saved activation."""
    product: int = 4
    """Bytes of a saved input of a matrix product."""
    copies: int = 0
    """Bytes of the low-precision copies of a weight: one by autocast, or an fp8 weight and its transpose by
    TransformerEngine 2.x."""
    narrowed: int = 0
    """Bytes that a weight of a layer's matrix takes less than other weights, if it is stored in fp8 alone."""


RECIPES: MappingProxyType[str, ElementBytes] = MappingProxyType(
    {
        "fp32": ElementBytes(4, 4, 4, 0),
        "fp64": ElementBytes(8, 8, 8, 0, 8, 8),
        "bf16-autocast": ElementBytes(4, 4, 4, 0, 2, 2, copies=2),
        "fp16-autocast": ElementBytes(4, 4, 4, 0, 2, 2, copies=2),
        "fp16-mixed": ElementBytes(2, 2, 4, 4, 2, 2),
        "bf16-mixed": ElementBytes(2, 2, 4, 4, 2, 2),
        "fp8-mixed": ElementBytes(2, 2, 4, 4, 2, 1, copies=2),
    }
)
"""Bytes per element for every precision that the formulas support."""


class ModelStates(NamedTuple):
    """Model states on one rank: bytes of parameters, gradients and optimizer state."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats

    @property
    def total(self) -> Floats:
        """Bytes of parameters, gradients and optimizer state together."""
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
    """Return the bytes that one rank holds for parameters, gradients and optimizer state.

    All shards are assumed to have the same size, without padding.

    Args:
        num_params: Ψ, the number of elements in all parameters.
        zero_stage: ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also parameters.
        data_parallel: N, the number of ranks over which ZeRO shards.
        optimizer: Name of the optimizer, an `Optimizer`, or its `OptimizerStates`.
        precision: A key of `RECIPES`, or an alias.
        num_tensors: Number of parameter tensors whose step counters the rank holds; 0 to ignore these, as in the paper.
        num_factors: Total number of rows and columns in all matrices, for optimizers such as Adafactor.
        num_aside: Number of elements in embeddings, the output projection and one-dimensional tensors, for optimizers
            such as Muon.
        gradient_bytes: Bytes of one gradient element, such as 4 for Megatron's ``main_grad``; 0 for the default of the
            precision.

    Raises:
        SpecError: The optimizer or the precision is unknown, or the ZeRO stage is not 0, 1, 2 or 3.

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


def checkpoint_bytes(
    num_params: npt.ArrayLike, *, optimizer: AnyStates = "adamw", precision: str = "fp32"
) -> Floats:
    """Return the size of a checkpoint in bytes: parameters and optimizer state, each once.

    Narayanan et al. 2021 (arXiv 2104.04473, section 5.10) report 13.8 TB for a trillion parameters in mixed precision
    with Adam, which is 14 bytes per parameter.

    Args:
        num_params: Number of elements in all parameters.
        optimizer: Name of the optimizer, an `Optimizer`, or its `OptimizerStates`.
        precision: A key of `RECIPES`, or an alias.

    Raises:
        SpecError: The optimizer or the precision is unknown.

    Example:
        >>> float(checkpoint_bytes(1e12, precision="fp16-mixed")) / 1e12
        14.0
    """
    states = model_states(num_params, optimizer=optimizer, precision=precision)
    return np.asarray(states.parameters + states.optimizer)


def partitioned(
    whole: ModelStates,
    *,
    stage: npt.NDArray[np.int64],
    ranks: Floats,
    gradients: npt.NDArray[np.bool_] | None = None,
    parameters: npt.NDArray[np.bool_] | None = None,
) -> ModelStates:
    """Return the model states on one rank if ZeRO shards the `whole` states over `ranks` ranks at this stage.

    Args:
        whole: The states without sharding.
        stage: ZeRO stage.
        ranks: Number of ranks that share the states.
        gradients: Whether gradients are sharded; None to shard them from stage 2 on.
        parameters: Whether parameters are sharded; None to shard them from stage 3 on.
    """
    part = 1 / ranks
    return ModelStates(
        whole.parameters * np.where(stage >= 3 if parameters is None else parameters, part, 1.0),
        whole.gradients * np.where(stage >= 2 if gradients is None else gradients, part, 1.0),
        whole.optimizer * np.where(stage >= 1, part, 1.0),
    )


def known_recipe(precision: str) -> ElementBytes:
    """Return the bytes per element for a precision, given its name or an alias.

    Raises:
        SpecError: The precision is unknown.
    """
    if precision not in RECIPES:
        precision = full_name(precision)
    if precision not in RECIPES:
        raise unknown_name("precision", precision, RECIPES)
    return RECIPES[precision]


def optimizer_bytes(
    kept: OptimizerStates,
    recipe: ElementBytes,
    elements: Floats,
    *,
    aside: npt.ArrayLike,
    factors: npt.ArrayLike,
) -> Floats:
    """Return the bytes of optimizer state, including master weights but not step counters.

    Args:
        kept: Size of the optimizer's state.
        recipe: Bytes per element of the precision.
        elements: Number of parameters.
        aside: Number of parameters in embeddings, the output projection and one-dimensional tensors.
        factors: Total number of rows and columns in all matrices.
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
    """Return the total bytes of model states on one rank. The arguments are the same as for `model_states`.

    Example:
        >>> float(model_state_bytes(7.5e9, zero_stage=[0, 2], data_parallel=64, precision="fp16-mixed")[0])
        120000000000.0
    """
    return model_states(
        num_params, zero_stage=zero_stage, data_parallel=data_parallel, optimizer=optimizer, precision=precision,
        num_tensors=num_tensors,
    ).total  # fmt: skip
