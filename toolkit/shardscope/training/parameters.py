"""Saves the trained parameters, atomically, to a file that NumPy can read without PyTorch or pickle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shardscope.training.strategies.base import RankStrategy

FILE = "parameters.npz"
_EXACT = {torch.float32, torch.float64}


def save_parameters(folder: Path, strategy: RankStrategy) -> Path:
    """Write all parameters as whole tensors to ``parameters.npz``. All ranks must call this; rank 0 writes the file.

    In the file, the array ``names`` contains the parameters' names, and ``value-N`` is the N-th parameter (from 0). A
    parameter's own name is not used as a key, because it could clash with an argument of `numpy.savez`. Dtypes other
    than fp32 and fp64, such as bf16, are written as fp32.

    Returns:
        The file's path, on all ranks.
    """
    parameters, path = strategy.full_parameters(), folder / FILE
    if strategy.all_ranks.rank != 0:
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
