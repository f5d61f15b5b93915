"""A step's seconds by what they go to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class StepParts(NamedTuple):
    """Seconds of one optimizer step on the device that takes longest, an array each; they add up to `total`."""

    compute: Floats
    """Forward and backward, each activation computed once."""
    recompute: Floats
    """Forward again, for activations that were not kept."""
    tensor_comm: Floats
    context_comm: Floats
    expert_comm: Floats
    pipeline_comm: Floats
    """Messages between stages."""
    bubble: Floats
    """Standing idle while the pipeline fills and drains, with what its micro-batches wait for."""
    data_comm: Floats
    """Reducing gradients and gathering parameters, as far as computation does not hide it."""
    optimizer: Floats
    offload: Floats
    """To and from the host, as far as computation does not hide it."""
    overhead: Floats
    """Waiting for the host to launch kernels, and what a step costs whatever its size."""
    total: Floats
