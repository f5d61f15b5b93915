"""Context managers for evaluating a model without side effects on training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

StandIns = Mapping[Tensor, Tensor]
"""Mapping from tensors of this rank's model to the tensors that replace them in evaluations and checkpoints."""


@contextmanager
def unchanged(module: nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Return a context manager that replaces tensors of `module` with `stand_ins`, and its other buffers with copies.

    On exit, the parameters and buffers of `module`, the training mode of its submodules, and the random number
    generators of Python, NumPy and torch are restored.
    """
    modes = [(part, part.training) for part in module.modules()]
    with random_state_kept(), _standing_in(module, stand_ins):
        try:
            yield
        finally:
            for part, is_training in modes:
                part.training = is_training


@contextmanager
def _standing_in(module: nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Replace tensor objects instead of copying values, so that an evaluation cannot write to the original tensors."""
    weights = [(p, p.data, stand_ins[p]) for p in module.parameters() if p in stand_ins]
    slots = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()  # noqa: SLF001 - setattr could run a method of the user's class
        if buffer is not None
    ]
    copies = {buffer: stand_ins[buffer] if buffer in stand_ins else buffer.clone() for _, _, buffer in slots}
    try:
        for parameter, _, shared in weights:
            parameter.data = shared
        for part, name, buffer in slots:
            part._buffers[name] = copies[buffer]  # noqa: SLF001
        yield
    finally:
        for parameter, own, _ in weights:
            parameter.data = own
        for part, name, buffer in slots:
            part._buffers[name] = buffer  # noqa: SLF001


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Return a context manager that restores the random number generators of Python, NumPy and PyTorch on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from the global generator
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
