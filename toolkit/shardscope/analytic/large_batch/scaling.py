"""Scaling of the learning rate to another batch size, by published rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError, unknown_name

Floats = NDArray[np.float64]
SCALING_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}
"""Exponent p of each rule: the learning rate grows with the batch size to the power of p."""


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
    """Scale a learning rate found at one batch size to others: ``lr (batch / base_batch) ** p``.

    ``linear`` (p = 1) is for SGD: Goyal et al. 2017 (arXiv 1706.02677), section 2.1, valid up to 8192 images there.
    ``sqrt`` (p = 1/2) keeps the variance of an update: Krizhevsky 2014 (arXiv 1404.5997), section 3; You et al. 2020
    (LAMB, arXiv 1904.00962) use it for layer-wise adaptive optimizers.

    Args:
        batch: Global batch sizes to scale to, in samples.
        lr: Learning rate that was found at `base_batch`.
        base_batch: Base batch size, in samples.
        rule: Name of the rule.

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
    """``max_lr / (1 + noise_scale / batch)``: linear in the batch well below the noise scale, flat well above it.

    It is the step along a noisy gradient that reduces a quadratic loss most: McCandlish et al. 2018 (arXiv
    1812.06162), equation 2.6.

    Args:
        batch: Batch size, in samples.
        max_lr: Optimal learning rate along the noiseless gradient.
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
    """Untuned scaling from the LAMB paper: learning rate with the square root of the batch, warm-up with the batch.

    You et al. 2020 (arXiv 1904.00962), the tables of untuned LAMB. The samples seen during warm-up grow linearly with
    the batch (linear-epoch warm-up), and so does the warm-up's share of the steps at a fixed number of epochs.

    Attributes:
        lr: Learning rate at `base_batch`.
        warmup_ratio: Fraction of warm-up steps, at `base_batch`.
        base_batch: Base batch size, in samples.
    """

    lr: float
    warmup_ratio: float
    base_batch: float

    def lr_at(self, batch: ArrayLike) -> Floats:
        """Return the learning rate at these batch sizes.

        Raises:
            SpecError: A batch is not above 0.
        """
        return scaled_lr(batch, lr=self.lr, base_batch=self.base_batch, rule="sqrt")

    def warmup_ratio_at(self, batch: ArrayLike) -> Floats:
        """Return the fraction of warm-up steps at these batch sizes.

        Raises:
            SpecError: A batch is not above 0, or so large that warm-up would exceed all steps.
        """
        ratio = self.warmup_ratio * positive("batch", batch) / self.base_batch
        if (ratio > 1).any():
            raise SpecError(
                f"batch={batch!r} is beyond the recipe, which at {self.base_batch / self.warmup_ratio:g} samples warms "
                "up all the time; use a smaller batch or a smaller warmup_ratio"
            )
        return np.asarray(ratio)


LAMB_BERT = LambRecipe(lr=5 / (2**3 * 1000), warmup_ratio=1 / 320, base_batch=512)
"""Recipe for the first phase of BERT-Large."""
LAMB_RESNET50 = LambRecipe(lr=4 / (2**3 * 100), warmup_ratio=0.3125 / 90, base_batch=512)
"""Recipe for ResNet-50 in 90 epochs."""
