"""Copies a model, to run a test pass without side effects on the original."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn


def twin_of(
    model: nn.Module, stand_ins: Mapping[nn.Parameter, nn.Parameter] | None = None
) -> nn.Module | None:
    """Return a copy that shares the model's parameters and copies everything else, such as buffers, counters and lists.

    If `stand_ins` is given, the copy has these parameters instead. Returns None if the model contains an object that
    cannot be copied, such as a lock.
    """
    own = {id(p): p if stand_ins is None else stand_ins[p] for p in model.parameters()}
    try:
        return copy.deepcopy(model, own)
    except Exception:  # noqa: BLE001 - a user's own class may raise any error when it is copied
        return None
