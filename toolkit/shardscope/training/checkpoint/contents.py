"""Contents of a checkpoint: model and optimizer state by name, the position in the data, and random states.

No settings are read from a checkpoint: a resumed run uses the settings of its job. If the job's optimizer differs from
that of the checkpoint, the saved optimizer state is loaded only when both optimizers have the same kind of state
(`Optimizer.carries`; for example, both AdamW and LAMB have moments). Otherwise the optimizer starts with a new state.
Compressor state is loaded only by the same method (see `compressor_state`). Training continues after the same number of
samples (`GlobalSampler.resume`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from shardscope.spec import Job
from shardscope.training.checkpoint.compressor_state import compressor_state, method_of
from shardscope.training.optim.state import fill_in_state
from shardscope.training.random_state import random_state
from shardscope.training.strategies.base import RankStrategy

STATE = "state."
RANK = "rank-"
"""Key prefix for each rank's own model and optimizer, in strategies whose ranks train different models."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_FROZEN = "frozen "
"""Prefix of the saved value of `carries` if the second moment was frozen, and so does not reflect the last steps."""


def contents_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """Return the complete state that this rank saves after `step`. All ranks must call this together.

    Args:
        strategy: The strategy that holds the model.
        optimizer: The strategy's optimizer.
        step: The last step taken.
        data: The position in the data: the result of `GlobalSampler.state_dict`.
    """
    context = strategy.context
    return {
        **strategy.checkpoint_state(optimizer),
        **compressor_state(strategy),
        "extra": extra_of(strategy, optimizer, step, data),
        random_key(context.rank): random_state(context.device),
    }


def random_key(rank: int) -> str:
    """Return the key under which a rank's random state is saved."""
    return f"random-{rank}"


def extra_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """Return the values to save in addition to tensors, such as the step; they are the same on every rank."""
    job, spec = strategy.job, strategy.job.optimizer
    frozen = _FROZEN if getattr(optimizer, "frozen_after", None) is not None else ""
    return {
        "step": step, "data": dict(data), "precision": strategy.precision.state_dict(), "layout": strategy.layout,
        "optimizer": spec.name, "carries": f"{frozen}{spec.carries}", "method": method_of(job.compression),
        "gradient_order": strategy.gradient_order, "world_size": strategy.context.world_size,
    }  # fmt: skip


def optimizer_state_fits(job: Job, extra: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether the saved optimizer state can be loaded into this job's optimizer, and notes about changes."""
    optimizer = job.optimizer
    before, carried = extra.get("optimizer", optimizer.name), extra.get("carries", optimizer.carries)
    if extra.get("method") == method_of(job.compression):  # the same method can resume from frozen moments
        carried = carried.removeprefix(_FROZEN)
    if carried != optimizer.carries:
        had, now = _state_words(before, carried), _state_words(optimizer.name, optimizer.carries)
        return False, [
            f"the checkpoint holds {had}, but this job uses {now}: the optimizer state is reset, the weights are kept"
        ]
    if before != optimizer.name and carried != "nothing":
        return True, [f"{optimizer.name} continues from the {carried} of {before}"]
    return True, []


def _state_words(name: str, carries: str) -> str:
    return f"the {carries} of {name}" if carries != "nothing" else f"no state of {name}"


def loadable_part(
    state: dict[str, Any], known: set[str], *, with_state: bool, within: str = ""
) -> dict[str, Any]:
    """Return the part of `state` to load: all of it except optimizer state that does not fit or was not saved.

    Args:
        state: Nested dictionaries of tensors and values, to be filled from the checkpoint.
        known: Keys in the checkpoint.
        with_state: Whether the saved optimizer state fits; if not, all of it is left out.
        within: Prefix of the keys of `state` in the checkpoint.
    """
    loadable: dict[str, Any] = {}
    for part, value in state.items():
        if part == "optimizer":
            prefix = f"{within}{part}."
            loadable[part] = {
                key: held for key, held in value.items() if with_state and f"{prefix}{key}" in known
            }
        elif part.startswith(RANK):
            loadable[part] = loadable_part(value, known, with_state=with_state, within=f"{within}{part}.")
        else:
            loadable[part] = value
    return loadable


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return model and optimizer state by name, as stored in a checkpoint."""
    return {"model": model.state_dict(), "optimizer": optimizer_state_of(model, optimizer)}


def load_state_of(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a state with the structure of `state_of`, filled from a checkpoint, into model and optimizer."""
    model.load_state_dict(state["model"])
    load_optimizer_state_of(state["optimizer"], model, optimizer)


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, without its settings, keyed by the parameters' names in `model`."""
    fill_in_state(optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {key: value for key, value in flat.items() if key.startswith(STATE)}


def load_optimizer_state_of(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load optimizer state with the keys of `optimizer_state_of`; entries missing from `state` stay unchanged."""
    own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    set_optimizer_state_dict(model, optimizer, optim_state_dict={**own, **state}, options=_FLAT)
