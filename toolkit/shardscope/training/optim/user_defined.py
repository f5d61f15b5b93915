"""Adapts the steps of user-defined optimizers to several ranks: equal random numbers, and gradients that they support.

Many optimizers compute the mean or the maximum of each gradient, which is undefined for an empty piece of a parameter.
They skip parameters whose gradient is None. Some optimizers keep a gradient for their next step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shardscope.spec.optimizer import Optimizer
from shardscope.training.optim.holding import digest_of

StepSeed = Callable[[], list[int | str]]
"""Function that returns the values that seed the random numbers of the next step."""

_BUILT_IN = "shardscope.methods."


def is_user_defined(spec: Optimizer) -> bool:
    """Return whether a user defined the optimizer."""
    return not type(spec).__module__.startswith(_BUILT_IN)


def empty_pieces(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters without elements."""
    return [p for group in optimizer.param_groups for p in group["params"] if not p.numel()]


@contextmanager
def gradients_for_step(
    optimizer: torch.optim.Optimizer, *, skips_empty: bool, copies: bool = False
) -> Iterator[None]:
    """Return a context manager within which the gradients are adapted to the optimizer.

    Args:
        optimizer: The optimizer.
        skips_empty: Whether the gradient of parameters without elements is None.
        copies: Whether gradients are copied, so that the optimizer may keep them; strategies write each step's
            gradients to the same memory.
    """
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for p, grad in held:
        if skips_empty and not p.numel():
            p.grad = None
        elif copies and grad is not None:
            p.grad = grad.clone()
    yield
    for p, grad in held:
        p.grad = grad


@contextmanager
def random_numbers_of(seed: StepSeed, device: torch.device) -> Iterator[None]:
    """Return a context manager in which random numbers depend only on `seed`; it then restores the generators."""
    number = int(digest_of(seed())[:15], 16)
    on_cpu, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch.default_generator.manual_seed(number)  # torch.manual_seed also keeps a list for devices not in use
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - the user's code may draw from the global generator
    if on_gpu is not None:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    yield
    torch.set_rng_state(on_cpu)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, device)
