"""Choosing a batch size and learning rate: scaling rules, the gradient noise scale, and the learning-rate range test.

    lr = scaled_lr(batch, lr=0.1, base_batch=256, rule="linear")
    noise = track(small_squares, large_squares, small_batch=16, large_batch=64)
    steps = steps_to_target(batch, min_steps=1000, critical_batch=noise.critical_batch[-1])

All functions accept arrays, which are broadcast against each other. Batch sizes are in samples.
"""

from shardscope.analytic.large_batch.noise import (
    NoiseEstimate,
    estimate,
    examples_at,
    examples_to_target,
    gradient_square,
    gradient_trace,
    steps_to_target,
    track,
)
from shardscope.analytic.large_batch.range_test import RateSuggestions, smoothed_loss, suggest_rates
from shardscope.analytic.large_batch.scaling import (
    LAMB_BERT,
    LAMB_RESNET50,
    LambRecipe,
    lr_for_noise,
    scaled_lr,
)

__all__ = [
    "LAMB_BERT",
    "LAMB_RESNET50",
    "LambRecipe",
    "NoiseEstimate",
    "RateSuggestions",
    "estimate",
    "examples_at",
    "examples_to_target",
    "gradient_square",
    "gradient_trace",
    "lr_for_noise",
    "scaled_lr",
    "smoothed_loss",
    "steps_to_target",
    "suggest_rates",
    "track",
]
