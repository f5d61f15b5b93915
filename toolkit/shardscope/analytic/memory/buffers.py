"""What a rank holds besides model states and saved activations: gathered layers, buckets, gradients, logits.

Two instants can be a step's peak, and both are counted on top of all that is saved: the loss on the last stage
(`at_the_loss`), and the backward pass through a layer (`in_a_layer`), which meets the most saved activations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.states import Recipe
from shardscope.analytic.memory.weights import Weights
from shardscope.spec.model import Mixture, Transformer

Floats = npt.NDArray[np.float64]


def at_the_loss(
    model: Transformer,
    recipe: Recipe,
    framework: Framework,
    *,
    tokens: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Bytes while the output projection runs backward: logits, the final norm's input and result, gradients of both.

    With the sequence split over tensor ranks, the projection's input and its gradient are whole for that while
    (Korthikanti et al. 2022, section 4.2.2). Logits are divided by the tensor degree (vocabulary parallel).
    """
    logits = framework.logits_bytes * model.vocab * tokens / tensor
    hidden = recipe.activation * model.hidden * tokens
    return np.asarray(logits + 3 * hidden / divided + 2 * hidden * (divided > 1))


def in_a_layer(
    model: Transformer, recipe: Recipe, *, tokens: Floats, tensor: Floats, divided: Floats
) -> Floats:
    """Bytes while a dense feed-forward layer runs backward: gradients of its inner inputs, and of the residual.

    The gradient of the second product's input takes the place of that input, which is no longer needed.
    """
    width = (1 + model.gated) * model.ffn
    return np.asarray(recipe.activation * tokens * (width / tensor + model.hidden / divided))


def in_a_mixture(
    model: Transformer,
    mixture: Mixture,
    recipe: Recipe,
    framework: Framework,
    *,
    expert: npt.ArrayLike,
    tokens: Floats,
    tensor: Floats,
    divided: Floats,
) -> Floats:
    """Bytes while a mixture runs: copies of routed tokens on their way, or gradients of its experts' inner inputs."""
    copies = np.where(np.asarray(expert) > 1, framework.routed_copies, 2) * mixture.active * model.hidden
    width = (1 + model.gated) * (mixture.active * mixture.ffn + mixture.shared_ffn)
    return np.asarray(
        recipe.activation * tokens * (np.maximum(copies, width / tensor) + model.hidden / divided)
    )


def in_the_attention(
    model: Transformer, recipe: Recipe, *, tokens: Floats, span: Floats, tensor: Floats
) -> Floats:
    """Bytes while attention that stores its scores runs backward: gradients before and after the softmax."""
    return np.asarray(2 * recipe.activation * model.heads * span * tokens / tensor)


def reused_gradients(weights: Weights, recipe: Recipe, *, dense: bool, mixed: bool) -> float:
    """Bytes of one placeholder for each shape of weight in a rank's layers, before division by the tensor degree.

    TransformerEngine 2.x `get_dummy_wgrad`: where the gradient is added to ``main_grad`` inside the product, autograd
    is given a placeholder of the weight's shape, kept and reused for all weights of that shape.
    """
    shapes = set(weights.attention)
    shapes |= set(weights.dense) if dense else set()
    shapes |= {*weights.shared, *weights.expert} if mixed else set()
    return float(recipe.activation * sum(rows * columns for rows, columns in shapes))
