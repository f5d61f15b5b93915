"""Copies a model, to run a test pass without side effects on the original."""

from __future__ import annotations

import copy

from torch import nn


def twin_of(model: nn.Module) -> nn.Module | None:
    """Return a copy that shares the model's parameters and copies everything else, such as buffers, counters and lists.

    Returns None if the model contains an object that cannot be copied, such as a lock.
    """
    try:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    except Exception:  # noqa: BLE001 - a user's own class may raise any error when it is copied
        return None
