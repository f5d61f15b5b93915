"""Codec of ``fp16`` compression."""

from __future__ import annotations

import torch

from shardscope.training.compression.casts import Cast


def codec() -> Cast:
    """Return a codec that rounds to the nearest ``float16``."""
    return Cast(torch.float16)
