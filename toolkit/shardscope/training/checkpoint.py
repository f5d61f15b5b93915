"""Checkpoints: saved by all ranks together with `torch.distributed.checkpoint`, complete or not there at all.

A checkpoint is written to ``step-N.partial`` and renamed to ``step-N`` once every rank's part is on disk, so whatever
carries the final name can be loaded. It can be loaded on another number of ranks than it was saved on.

The job that goes on may have other settings, and they hold: no setting comes from a checkpoint. What an optimizer
carries is taken up by any that carries the same (`Optimizer.carries`: AdamW and LAMB take up each other's moments) and
starts afresh elsewhere; what a compressor remembers is its own method's (`remembered`); the data go on after as many
samples (`GlobalSampler.go_on`).
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from shardscope.spec import Job
from shardscope.training.optim.state import fill_in_state
from shardscope.training.remembered import Recalled, method_of, recall, remembered
from shardscope.training.strategies.base import Strategy

_COMPLETE = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint had for this rank, beside what went into model and optimizer.

    Attributes:
        path: It.
        step: The step after which it was saved.
        data: The `GlobalSampler.state_dict` of that step.
        recalled: What became of what its compressor remembered.
        notes: A sentence for each thing that does not go on as it was.
    """

    path: Path
    step: int
    data: Mapping[str, int]
    recalled: Recalled
    notes: list[str]


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
    data: Mapping[str, int],
) -> Path:
    """Save the state after `step`, with where the `data` are; called by all ranks. Returns where it is.

    Raises:
        OSError: It could not be written; the checkpoints that were there before still are.
    """
    final, partial = folder / f"step-{step}", folder / f"step-{step}.partial"
    started, context = time.time(), strategy.context
    state = strategy.checkpoint_state(optimizer)
    state |= remembered(strategy)
    state["extra"] = _extra(strategy, optimizer, step, data)
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
) -> Loaded:
    """Put the newest complete checkpoint of `folder` into model and optimizer; called by all ranks.

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
    known = _saved_keys(path)
    extra = _read_extra(path, strategy, optimizer, known)
    fits, notes = _what_fits(strategy.job, extra)
    state = _asked_of(strategy.checkpoint_state(optimizer), known, with_state=fits)
    try:
        dcp.load(state, checkpoint_id=path, no_dist=context.world_size == 1)
    except (RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(f"{path} does not fit this model ({reason}); resume the same model") from error
    precision.load_state_dict(extra.get("precision", {}))
    strategy.load_checkpoint_state(state, optimizer)  # last: a rank may have a loss scale of its own
    recalled = recall(strategy, path, extra.get("layout"), extra.get("method"))
    random = extra.get(f"random-{context.rank}")
    if random is not None:  # a rank that was not there when it was saved keeps the state its seed gave it
        torch.set_rng_state(random)
    size = strategy.job.batch.global_size
    data = extra.get("data") or {"global_size": size, "step": 0, "epoch": 0, "row": 0, "samples": 0}
    return Loaded(path, int(extra["step"]), data, recalled, [*notes, *recalled.notes])


# What is in a checkpoint beside model and optimizer.


def _extra(
    strategy: Strategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    job, spec = strategy.job, strategy.job.optimizer
    frozen = _FROZEN if getattr(optimizer, "frozen_after", None) is not None else ""
    return {
        "step": step, "data": dict(data), "precision": strategy.precision.state_dict(), "layout": strategy.layout,
        "optimizer": spec.name, "carries": f"{frozen}{spec.carries}", "method": method_of(job.compression),
        **_random_state(strategy.context.rank),
    }  # fmt: skip


_FROZEN = "frozen "
"""Of moments the second of which stands still, so that it no longer counts the steps that the first does."""
_NO_DATA = {"global_size": 0, "step": 0, "epoch": 0, "row": 0, "samples": 0}


def _read_extra(
    path: Path, strategy: Strategy, optimizer: torch.optim.Optimizer, known: set[str]
) -> dict[str, Any]:
    """What of it this checkpoint has: older ones know less."""
    extra = {
        key: value
        for key, value in _extra(strategy, optimizer, 0, _NO_DATA).items()
        if _is_saved(f"extra.{key}", known)
    }
    dcp.load({"extra": extra}, checkpoint_id=path, no_dist=strategy.context.world_size == 1)
    return extra


def _what_fits(job: Job, extra: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether the saved state is that of this job's optimizer, and what there is to say about it."""
    optimizer = job.optimizer
    before, carried = extra.get("optimizer", optimizer.name), extra.get("carries", optimizer.carries)
    if extra.get("method") == method_of(job.compression):  # what it has frozen, it knows to go on with
        carried = carried.removeprefix(_FROZEN)
    if carried != optimizer.carries:
        had, now = _state_words(before, carried), _state_words(optimizer.name, optimizer.carries)
        return False, [
            f"the checkpoint holds {had}, which are not {now}: these start afresh, the weights go on"
        ]
    if before != optimizer.name and carried != "nothing":
        return True, [f"{optimizer.name} goes on from the {carried} of {before}"]
    return True, []


def _state_words(name: str, carries: str) -> str:
    return f"the {carries} of {name}" if carries != "nothing" else f"no state of {name}"


def _asked_of(
    state: dict[str, Any], known: set[str], *, with_state: bool, within: str = ""
) -> dict[str, Any]:
    """`state` without what is not to be read: settings, and state that does not fit or is not there."""
    asked: dict[str, Any] = {}
    for part, value in state.items():
        if part == "optimizer":
            prefix = f"{within}{part}."
            asked[part] = {
                key: held
                for key, held in value.items()
                if key.startswith(_STATE) and with_state and f"{prefix}{key}" in known
            }
        elif part.startswith(_RANK):
            asked[part] = _asked_of(value, known, with_state=with_state, within=f"{within}{part}.")
        else:
            asked[part] = value
    return asked


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."
_RANK = "rank-"
"""Under which a strategy whose ranks differ keeps each rank's own model and optimizer."""
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
    """Put what of `optimizer_state_of` came from a checkpoint into the optimizer; the rest stays as it is."""
    own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    set_optimizer_state_dict(model, optimizer, optim_state_dict={**own, **state}, options=_FLAT)


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
