"""A run's weights as a file that `torch.load` or safetensors reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.errors import SpecError
from shardscope.runtime.export._library import library

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run


def write_pt(run: Run, path: str | Path) -> str:
    """Write, with `torch.save`, the last state dict that the run saved, and return the file's path."""
    import torch

    state = run.state_dict()
    return _written(path, lambda partial: torch.save(state, partial))


def write_safetensors(run: Run, path: str | Path) -> str:
    """Write, as safetensors, the last state dict that the run saved, and return the file's path.

    Raises:
        SpecError: safetensors cannot be imported, or the state dict has an entry that is not a tensor.
    """
    save: Callable[[dict[str, Any], Path], None]
    save = library("safetensors.torch", package="safetensors", format="safetensors").save_file
    import torch

    state = run.state_dict()
    other = next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None)
    if other is not None:
        raise SpecError(
            f"{other!r} in the weights of run {run.id} is a {type(state[other]).__name__}, but safetensors holds only "
            "tensors; use format='pt'"
        )
    return _written(path, lambda partial: save(state, partial))


def _written(path: str | Path, write: Callable[[Path], object]) -> str:
    """Write a file under another name first, so that a failure leaves no incomplete file."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.partial")
    try:
        write(partial)
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)
    return str(final)
