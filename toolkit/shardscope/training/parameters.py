"""The trained parameters as a file that NumPy can read, without torch or pickle, and written atomically."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shardscope.training.strategies.base import RankStrategy

FILE = "parameters.npz"
_EXACT = {torch.float32, torch.float64}


def save_parameters(folder: Path, strategy: RankStrategy) -> Path:
    """Write all parameters, whole and by name, to ``parameters.npz``; called by all ranks, written by rank 0.

    ``names`` holds the parameters' names and ``value-N`` the N-th parameter, because a user's name could be reserved
    by `numpy.savez`. Number formats that NumPy lacks, such as bf16, are written as fp32.
    """
    parameters, path = strategy.full_parameters(), folder / FILE
    if strategy.context.rank != 0:
        return path
    arrays = {f"value-{number}": _array(tensor) for number, tensor in enumerate(parameters.values())}
    partial = folder / f".{FILE}"
    with partial.open("wb") as file:
        np.savez(file, names=np.array(list(parameters), dtype=np.str_), **arrays)  # type: ignore[arg-type]  # the stub takes them for allow_pickle
    partial.replace(path)
    return path


def _array(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.detach().cpu()
    return (whole if whole.dtype in _EXACT else whole.float()).numpy()
