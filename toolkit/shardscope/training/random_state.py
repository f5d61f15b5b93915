"""Saves and restores the state of all random number generators that Shardscope or the user's code may use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TWISTER = "MT19937"


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of PyTorch's generators (CPU and `device`) and of Python's and NumPy's global generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python_gauss": gauss,
        **_numpy_state(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state that `random_state` returned; generators missing from `state` are left unchanged."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, *words = state["python"].tolist()
        random.setstate((version, tuple(words), state["python_gauss"]))
    if "numpy" in state:
        *words, position, has_gauss = state["numpy"].tolist()
        kept = (_TWISTER, np.array(words, np.uint32), position, has_gauss, state["numpy_gauss"])
        np.random.set_state(kept)  # noqa: NPY002 - the user's code may draw from the global generator
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _numpy_state() -> dict[str, Any]:
    """Return the state of NumPy's global generator; empty if the user has replaced it with a different type."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    assert isinstance(state, dict)
    if state["bit_generator"] != _TWISTER:
        return {}
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    numbers = torch.tensor([state["state"]["pos"], state["has_gauss"]])
    return {"numpy": torch.cat([words, numbers]), "numpy_gauss": state["gauss"]}


def seed_everything(seed: int) -> None:
    """Seed all random number generators, so that initial weights are the same on all ranks and in repeated runs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from the global generator
    torch.manual_seed(seed)
