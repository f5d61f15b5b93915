"""Checkpoints: saved by all ranks together with `torch.distributed.checkpoint`, complete or not there at all.

A checkpoint is written to ``step-N.partial`` and renamed to ``step-N`` once every rank's part is on disk, so whatever
carries the final name can be loaded. It can be loaded on another number of ranks than it was saved on.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardscope.errors import CheckpointError
from shardscope.training.optim.state import fill_in_state
from shardscope.training.remembered import recall, remembered
from shardscope.training.strategies.base import Strategy

_COMPLETE = re.compile(r"step-(\d+)")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that can be loaded, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _COMPLETE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save(
    folder: Path,
    step: int,
    *,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> Path:
    """Save the state after `step`; called by all ranks. Returns where it is.

    Raises:
        OSError: It could not be written; the checkpoints that were there before still are.
    """
    final, partial = folder / f"step-{step}", folder / f"step-{step}.partial"
    started, context, precision = time.time(), strategy.context, strategy.precision
    state = strategy.checkpoint_state(optimizer)
    state |= remembered(strategy)
    state["extra"] = {
        "step": step, "precision": precision.state_dict(), "layout": strategy.layout, **_random_state(context.rank)
    }  # fmt: skip
    with context.meter.span("compute", "checkpoint"):
        dcp.save(state, checkpoint_id=partial, no_dist=context.world_size == 1)
        if context.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in complete_checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        if context.group is not None:
            dist.barrier()
    context.events.emit("checkpoint", step=step, path=final.name, seconds=round(time.time() - started, 4))
    return final


def load(
    folder: Path,
    *,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Put the newest complete checkpoint of `folder` into model and optimizer; called by all ranks.

    Returns:
        The step after which it was saved.

    Raises:
        CheckpointError: There is none, it belongs to another model, or its files are not the user's own.
    """
    found = complete_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"no complete checkpoint in {folder}; run with Checkpoint(every=...) to have some"
        )
    path = found[-1]
    _refuse_foreign([path, *path.iterdir()])
    context, precision = strategy.context, strategy.precision
    state = strategy.checkpoint_state(optimizer)
    state["extra"] = {
        "step": 0, "precision": precision.state_dict(), "layout": strategy.layout, **_random_state(context.rank)
    }  # fmt: skip
    known = _saved_keys(path)
    state["extra"] = {key: value for key, value in state["extra"].items() if _is_saved(f"extra.{key}", known)}
    try:
        dcp.load(state, checkpoint_id=path, no_dist=context.world_size == 1)
    except (RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"{path} does not fit this model and optimizer ({reason}); resume the same job"
        ) from error
    precision.load_state_dict(state["extra"].get("precision", {}))
    strategy.load_checkpoint_state(state, optimizer)  # last: a rank may have a loss scale of its own
    what = recall(strategy, path, state["extra"].get("layout"))
    if strategy.compressor is not None:
        context.events.emit("recall", path=path.name, remembered=what)
    random = state["extra"].get(f"random-{context.rank}")
    if random is not None:  # a rank that was not there when it was saved keeps the state its seed gave it
        torch.set_rng_state(random)
    return int(state["extra"]["step"])


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_NAMES_OF_GROUP = ".param_names"
"""Which parameters a group has is no state: a rank may hold others than the one that saved."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer by name, as a checkpoint holds them."""
    return {"model": model.state_dict(), "optimizer": optimizer_state_of(model, optimizer)}


def load_state_of(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put what `state_of` gave, filled from a checkpoint, into model and optimizer."""
    model.load_state_dict(state["model"])
    load_optimizer_state_of(state["optimizer"], model, optimizer)


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names that its parameters have in `model`."""
    fill_in_state(optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {key: value for key, value in flat.items() if not key.endswith(_NAMES_OF_GROUP)}


def load_optimizer_state_of(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Put what `optimizer_state_of` gave, filled from a checkpoint, into the optimizer."""
    own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    names = {key: value for key, value in own.items() if key.endswith(_NAMES_OF_GROUP)}
    set_optimizer_state_dict(model, optimizer, optim_state_dict={**state, **names}, options=_FLAT)


def _random_state(rank: int) -> dict[str, Any]:
    return {f"random-{rank}": torch.get_rng_state()}


def _saved_keys(path: Path) -> set[str]:
    return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def _is_saved(prefix: str, known: set[str]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for key in known)


def _refuse_foreign(paths: Sequence[Path]) -> None:
    """A checkpoint's index is a pickle: only files that this user wrote are opened."""
    for path in paths:
        owner = path.stat().st_uid
        if owner != os.getuid():
            raise CheckpointError(
                f"{path} belongs to user {owner}, not to you; only your own checkpoints are loaded"
            )
