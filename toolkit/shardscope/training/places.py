"""Places in a list of things, as opposed to positions of tokens in sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def places_of(count: int, device: torch.device) -> Tensor:
    """Return the numbers from 0 to below `count`, whatever the length of sequences.

    In a model with parts of sequences, ``torch.arange(T)`` stands for the positions of a rank's T tokens; see
    `SequenceSplit.install`.
    """
    return torch.arange(1, count + 1, device=device) - 1
