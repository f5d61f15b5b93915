"""A stand-in for a model, to try out what a forward pass does without leaving a trace in the model."""

from __future__ import annotations

import copy

from torch import nn


def twin_of(model: nn.Module) -> nn.Module | None:
    """A copy with the model's own parameters, and copies of all else: buffers, counters, lists.

    None where the model holds what cannot be copied, such as a lock.
    """
    try:
        return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    except Exception:  # noqa: BLE001 - any: what a user's own class raises when it is copied
        return None
