"""Published rules for scaling the learning rate with the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError, unknown_name
from shardscope.spec.optimizer import SCALING_EXPONENTS

Floats = NDArray[np.float64]


def positive(name: str, values: ArrayLike) -> Floats:
    """Return `values` as an array of floats.

    Raises:
        SpecError: A value is not above 0.
    """
    array = np.asarray(values, dtype=float)
    if not (array > 0).all():
        raise SpecError(f"{name}={values!r} must be above 0")
    return array


def scaled_lr(
    batch: ArrayLike, *, lr: ArrayLike, base_batch: ArrayLike, rule: Literal["linear", "sqrt"]
) -> Floats:
    """Return a learning rate scaled to a different batch size: ``lr (batch / base_batch) ** p``.

    The rule ``linear`` (p = 1) is for SGD; Goyal et al. 2017 (arXiv 1706.02677, section 2.1) found it valid up to a
    batch of 8192 images. The rule ``sqrt`` (p = 1/2) keeps the variance of an update constant (Krizhevsky 2014, arXiv
    1404.5997, section 3); You et al. 2020 (LAMB, arXiv 1904.00962) use it for layer-wise adaptive optimizers.

    Args:
        batch: Global batch size to scale to, in samples.
        lr: Learning rate that works well at `base_batch`.
        base_batch: Batch size for which `lr` was chosen, in samples.
        rule: Name of the rule, ``linear`` or ``sqrt``.

    Raises:
        SpecError: The rule is unknown, or a value is not above 0.

    Example:
        >>> scaled_lr([512, 8192], lr=0.1, base_batch=256, rule="linear").tolist()
        [0.2, 3.2]
    """
    if rule not in SCALING_EXPONENTS:
        raise unknown_name("rule", rule, SCALING_EXPONENTS)
    growth = positive("batch", batch) / positive("base_batch", base_batch)
    return np.asarray(positive("lr", lr) * growth ** SCALING_EXPONENTS[rule])


def lr_for_noise(batch: ArrayLike, *, max_lr: ArrayLike, noise_scale: ArrayLike) -> Floats:
    """Return the optimal learning rate for a gradient noise scale: ``max_lr / (1 + noise_scale / batch)``.

    The rate is proportional to the batch size well below the noise scale, and constant well above it. It maximises the
    expected decrease of a quadratic loss in a step along a noisy gradient (McCandlish et al. 2018, arXiv 1812.06162,
    equation 2.6).

    Args:
        batch: Batch size, in samples.
        max_lr: Optimal learning rate for a gradient without noise.
        noise_scale: Gradient noise scale, in samples.

    Raises:
        SpecError: A value is not above 0.

    Example:
        >>> float(lr_for_noise(1000, max_lr=0.4, noise_scale=1000))
        0.2
    """
    return np.asarray(
        positive("max_lr", max_lr) / (1 + positive("noise_scale", noise_scale) / positive("batch", batch))
    )


@dataclass(frozen=True)
class LambRecipe:
    """Rule from the LAMB paper for scaling learning rate and warm-up with the batch size, without tuning.

    The learning rate grows with the square root of the batch size. The fraction of steps spent on warm-up grows
    linearly with the batch size ("linear-epoch warm-up"). Source: You et al. 2020 (arXiv 1904.00962), the tables of
    untuned LAMB.

    Attributes:
        lr: Learning rate at `base_batch`.
        warmup_ratio: Fraction of steps spent on warm-up, at `base_batch`.
        base_batch: Batch size for which `lr` and `warmup_ratio` were chosen, in samples.
    """

    lr: float
    warmup_ratio: float
    base_batch: float

    def lr_at(self, batch: ArrayLike) -> Floats:
        """Return the learning rate for a batch size, in samples.

        Raises:
            SpecError: A batch size is not above 0.
        """
        return scaled_lr(batch, lr=self.lr, base_batch=self.base_batch, rule="sqrt")

    def warmup_ratio_at(self, batch: ArrayLike) -> Floats:
        """Return the fraction of steps to spend on warm-up for a batch size, in samples.

        Raises:
            SpecError: A batch size is not above 0, or so large that warm-up would take more than all steps.
        """
        ratio = self.warmup_ratio * positive("batch", batch) / self.base_batch
        if (ratio > 1).any():
            raise SpecError(
                f"batch={batch!r} is too large for the recipe, whose warm-up takes all steps at a batch of "
                f"{self.base_batch / self.warmup_ratio:g}; use a smaller batch or a smaller warmup_ratio"
            )
        return np.asarray(ratio)


LAMB_BERT = LambRecipe(lr=5 / (2**3 * 1000), warmup_ratio=1 / 320, base_batch=512)
"""Recipe for the first phase of training BERT-Large."""
LAMB_RESNET50 = LambRecipe(lr=4 / (2**3 * 100), warmup_ratio=0.3125 / 90, base_batch=512)
"""Recipe for training ResNet-50 for 90 epochs."""
