"""Looking at a model without a trace: whatever an evaluation runs, training goes on as if it had not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

StandIns = Mapping[Tensor, Tensor]
"""Tensors of this rank's model, and what stands in for each wherever the run as a whole is looked at."""


@contextmanager
def unchanged(module: nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Inside, `module` holds the `stand_ins` and copies of all other buffers; afterwards, everything is as it was.

    That is its parameters and buffers, which parts of it are in training mode, and the random number generators of
    Python, NumPy and torch.
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
    """Swaps tensors, not numbers: nothing that an evaluation writes to reaches what is put back."""
    weights = [(p, p.data, stand_ins[p]) for p in module.parameters() if p in stand_ins]
    slots = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()  # noqa: SLF001 - assigning an attribute runs what users override
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
    """Inside, draws from the generators of Python, NumPy and torch leave no trace in them."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from the global generator
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
