"""The weights that a run has saved, as a plain state dict: whole tensors by name, regardless of the strategy that
trained them.
"""

from __future__ import annotations

import zipfile
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.errors import CheckpointError, SpecError, quoted

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run

_MODEL, _EXTRA = "model.", "_extra_state."


def state_dict_of(run: Run, step: int | None) -> dict[str, Any]:
    """Return the state dict of a run's model after `step`; None for the last step that the run has saved.

    Raises:
        SpecError: `step` is neither a whole number nor None.
        CheckpointError: The run has not saved its weights after this step, or they are corrupt.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral)):
        raise SpecError(
            f"step={quoted(step)} is not valid: give a whole number, or None for the last saved step"
        )
    while True:
        path = _saved(run, step)
        try:
            return _of_checkpoint(path) if path.suffix != ".npz" else _of_parameters(path)
        except (OSError, KeyError, zipfile.BadZipFile, CheckpointError) as error:
            if not path.exists() or _saved(run, step) != path:  # the run has deleted it for a newer one
                continue
            raise CheckpointError(f"the weights of run {run.id} in {path} cannot be read: {error}") from error


def _saved(run: Run, step: int | None) -> Path:
    """Return the file that currently holds a run's weights after `step`: a checkpoint, or a file of parameters."""
    from shardscope.training.checkpoint.folders import complete_checkpoints, step_of

    saved = {step_of(path): path for path in complete_checkpoints(run.path / "checkpoints")}
    file = run.path / "parameters.npz"
    if file.is_file():
        saved.setdefault(run.job.last_step, file)
    if not saved:
        raise CheckpointError(
            f"run {run.id} has saved no weights; launch it with checkpoint=Checkpoint(at_end=True) to keep them"
        )
    wanted = max(saved) if step is None else step
    if wanted not in saved:
        steps = ", ".join(map(str, sorted(saved)))
        raise CheckpointError(
            f"run {run.id} has no weights of step={step}; it has saved those of step {steps}"
        )
    return saved[wanted]


def _of_checkpoint(path: Path) -> dict[str, Any]:
    from shardscope.training.checkpoint.index import read_index, verify
    from shardscope.training.checkpoint.pieces import CheckpointReader

    index = read_index(path)
    verify(path, index, index.files)
    reader = CheckpointReader(path, index)
    empty = {key: reader.zeros(key) for key in sorted(reader.keys) if key.startswith(_MODEL)}
    return _nested(reader.fill(empty))


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return entries by their names in the model; a module's extra state becomes a nested dictionary."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        before, is_extra, inside = key.removeprefix(_MODEL).partition(_EXTRA)
        at, *path = [f"{before}{_EXTRA[:-1]}", *inside.split(".")] if is_extra else [before]
        place = found
        for part in path:
            place, at = place.setdefault(at, {}), part
        place[at] = value
    return found


def _of_parameters(path: Path) -> dict[str, Any]:
    import torch

    try:
        with np.load(path, allow_pickle=False) as file:
            names = [str(name) for name in file["names"]]
            return {name: torch.from_numpy(file[f"value-{number}"]) for number, name in enumerate(names)}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is not a file of parameters: {error}") from error
