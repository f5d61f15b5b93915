"""FLOPs per step, counted from the matrix products."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute import work
from shardscope.analytic.compute.work import Matmul, Split
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]
Numbers = npt.ArrayLike


def products(model: Transformer) -> tuple[tuple[Matmul, float], ...]:
    """Return the matrix products in the forward pass of one sequence, and how many times each occurs in the model."""
    one = Split.of()
    routed = model.num_mixture_layers
    every = (*work.projections(model, one), *work.attention_core(model, one))
    dense = work.feed_forward(model, one, model.ffn)
    experts = work.experts(model, one) if model.mixture is not None else ()
    return (
        *((product, float(model.layers)) for product in every),
        *((product, float(model.layers - routed)) for product in dense),
        *((product, float(routed)) for product in experts),
        (work.head(model, one), 1.0),
    )


def forward_flops(model: Transformer) -> float:
    """Return the FLOPs of the forward pass of one sequence, with all seq x seq attention scores, even if causal."""
    return float(sum(product.flops * times for product, times in products(model)))


def model_flops(model: Transformer, sequences: Numbers) -> Floats:
    """Return the FLOPs that a step needs: the forward pass, plus twice as many for the backward pass.

    This is the numerator of MFU, model FLOPs utilization.

    Args:
        model: The model.
        sequences: Number of sequences in the global batch.
    """
    return np.asarray(3.0 * forward_flops(model) * np.asarray(sequences, float))


def least_flops(model: Transformer, sequences: Numbers) -> Floats:
    """Return the minimum FLOPs of a step: `model_flops` with only the causal half of the attention scores.

    Args:
        model: The model.
        sequences: Number of sequences in the global batch.
    """
    needed = forward_flops(model) - _core(model) / 2
    return np.asarray(3.0 * needed * np.asarray(sequences, float))


def hardware_flops(
    model: Transformer, sequences: Numbers, *, recompute: str = "none", layers: int | None = None
) -> Floats:
    """Return the FLOPs that a step executes, including recomputation: the numerator of HFU.

    Args:
        model: The model.
        sequences: Number of sequences in the global batch.
        recompute: What the backward pass recomputes: ``"none"``, ``"selective"`` (core attention) or ``"full"`` (all
            transformer blocks).
        layers: Number of layers in the model that are recomputed; if only some layers have experts, each counts as an
            average layer. None for all layers.
    """
    share = 1.0 if layers is None else layers / model.layers
    again = {"none": 0.0, "selective": _core(model), "full": share * _blocks(model)}[recompute]
    return np.asarray((3.0 * forward_flops(model) + again) * np.asarray(sequences, float))


def _core(model: Transformer) -> float:
    """Return the FLOPs of core attention in the forward pass of one sequence."""
    return _sum(work.attention_core(model, Split.of())) * model.layers


def _blocks(model: Transformer) -> float:
    """Return the FLOPs of all transformer blocks in the forward pass of one sequence."""
    return forward_flops(model) - _sum((work.head(model, Split.of()),))


def _sum(given: Iterable[Matmul]) -> float:
    return float(sum(product.flops for product in given))
