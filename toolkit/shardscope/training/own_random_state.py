"""Restores random number generators in a user's data set, so that reading rows before training changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

_DEEPEST, _MOST_PARTS = 6, 100
"""Maximum depth of the search for generators, and maximum length of searched collections: transforms, but not rows."""


@contextmanager
def generators_kept(holder: Any) -> Iterator[None]:
    """Return a context manager that restores, on exit, the generators found in the attributes of an object."""
    restores = [*_restores(holder, set(), 0)]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _restores(value: Any, seen: set[int], depth: int) -> Iterator[Callable[[], None]]:
    if id(value) in seen or depth > _DEEPEST or isinstance(value, type):
        return
    seen.add(id(value))
    restore = _restore_of(value)
    if restore is not None:
        yield restore
        return
    parts: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, dict | list | tuple) and len(value) <= _MOST_PARTS:
        parts.extend(value.values() if isinstance(value, dict) else value)
    for part in parts:
        yield from _restores(part, seen, depth + 1)


def _set_torch(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _restore_of(value: Any) -> Callable[[], None] | None:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return partial(_set_torch, value, state)
    if isinstance(value, random.Random):
        own = value.getstate()
        return lambda: value.setstate(own)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, np.random.Generator):
        bits, drawn = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", drawn)
    return None
