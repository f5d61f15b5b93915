"""Whether optimizers can use kernels that Triton compiles for the GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from functools import cache

import torch

from shardscope.training.compression.route import VARIABLE


def why_not_triton() -> str | None:
    """Return why Triton cannot compile kernels for this machine's GPUs; None if it can.

    ``SHARDSCOPE_CODECS=torch`` turns off Triton as well as numba.
    """
    if os.environ.get(VARIABLE) == "torch":
        return f"the environment variable {VARIABLE} is 'torch'"
    return _fault()


@cache
def _fault() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if triton.knobs.runtime.interpret:
        return None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "Triton needs an NVIDIA GPU of compute capability 8.0 or newer"
    try:  # its interface to the driver is a C module, which the first process of a machine compiles
        _ = triton.runtime.driver.active.utils
    except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        return f"Triton cannot build its interface to the GPU with a C compiler and Python's headers: {error}"
    return None
