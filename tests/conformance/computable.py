"""What torch can compute on this processor: tests ask it, instead of assuming AVX-512."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardscope.training.computable import uncomputable_layers


def skip_unless_computable(model: nn.Module, dtype: torch.dtype) -> None:
    """Skip a test that needs a layer which torch does not compute under CPU autocast to `dtype` here."""
    if failing := uncomputable_layers(model, dtype):
        pytest.skip(f"this processor's torch cannot compute in {dtype}: {', '.join(failing)}")
