"""FLOPs per step: exact, from the matrix products, and by the closed forms given in papers."""

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
    """Return every matrix product in one sequence's forward pass, and how many times the model runs it."""
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
    """FLOPs of one sequence's forward pass; attention counts all seq x seq scores, as in the papers."""
    return float(sum(product.flops * times for product, times in products(model)))


def model_flops(model: Transformer, sequences: Numbers) -> Floats:
    """FLOPs that a step needs, the numerator of MFU: the forward pass, plus twice as many for the backward pass.

    Args:
        model: The model.
        sequences: Sequences in the global batch.
    """
    return np.asarray(3.0 * forward_flops(model) * np.asarray(sequences, float))


def hardware_flops(model: Transformer, sequences: Numbers, *, recompute: str = "none") -> Floats:
    """FLOPs that a step executes, including recomputation: the numerator of HFU.

    Args:
        model: The model.
        sequences: Number of sequences in the global batch.
        recompute: ``"none"``, ``"selective"`` (core attention again) or ``"full"`` (every block again).
    """
    again = {"none": 0.0, "selective": _core(model), "full": _blocks(model)}[recompute]
    return np.asarray((3.0 * forward_flops(model) + again) * np.asarray(sequences, float))


def megatron_flops(batch: Numbers, seq: Numbers, layers: Numbers, hidden: Numbers, vocab: Numbers) -> Floats:
    """F = 96 B s l h² (1 + s/(6h) + V/(16 l h)), full recomputation included: arXiv 2104.04473, equation 3."""
    b, s, l, h, v = _floats(batch, seq, layers, hidden, vocab)  # noqa: E741
    return np.asarray(96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h)))


def _core(model: Transformer) -> float:
    return _sum(work.attention_core(model, Split.of())) * model.layers


def _blocks(model: Transformer) -> float:
    return forward_flops(model) - _sum((work.head(model, Split.of()),))


def _sum(given: Iterable[Matmul]) -> float:
    return float(sum(product.flops for product in given))


def _floats(*values: Numbers) -> list[Floats]:
    return [np.asarray(value, float) for value in values]
