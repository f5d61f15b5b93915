"""Contents of a checkpoint: model and optimizer by name, the run's position in its data, and random states.

The resumed job may have other settings, and those apply: no setting comes from a checkpoint. An optimizer's state is
loaded by any optimizer that carries the same (`Optimizer.carries`: AdamW and LAMB load each other's moments), and is
reset elsewhere. Compressor state belongs to its method (`compressor_state`). The data resume after the same number of
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
"""Key prefix under which a strategy whose ranks differ keeps each rank's own model and optimizer."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_FROZEN = "frozen "
"""Prefix of `carries` for moments with a frozen second one, which no longer counts the same steps as the first."""


def contents_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """Everything that this rank saves after `step`, with the position in the `data`; called by all ranks."""
    context = strategy.context
    return {
        **strategy.checkpoint_state(optimizer),
        **compressor_state(strategy),
        "extra": extra_of(strategy, optimizer, step, data),
        random_key(context.rank): random_state(context.device),
    }


def random_key(rank: int) -> str:
    """Key under which a rank's random state is saved."""
    return f"random-{rank}"


def extra_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """Values saved in addition to tensors, the same on every rank."""
    job, spec = strategy.job, strategy.job.optimizer
    frozen = _FROZEN if getattr(optimizer, "frozen_after", None) is not None else ""
    return {
        "step": step, "data": dict(data), "precision": strategy.precision.state_dict(), "layout": strategy.layout,
        "optimizer": spec.name, "carries": f"{frozen}{spec.carries}", "method": method_of(job.compression),
        "gradient_order": strategy.gradient_order,
    }  # fmt: skip


def what_fits(job: Job, extra: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether the saved state fits this job's optimizer, and notes about it."""
    optimizer = job.optimizer
    before, carried = extra.get("optimizer", optimizer.name), extra.get("carries", optimizer.carries)
    if extra.get("method") == method_of(job.compression):  # the same method can resume from frozen moments
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


def asked_of(state: dict[str, Any], known: set[str], *, with_state: bool, within: str = "") -> dict[str, Any]:
    """`state` without the optimizer state that does not fit or that the checkpoint lacks."""
    asked: dict[str, Any] = {}
    for part, value in state.items():
        if part == "optimizer":
            prefix = f"{within}{part}."
            asked[part] = {
                key: held for key, held in value.items() if with_state and f"{prefix}{key}" in known
            }
        elif part.startswith(RANK):
            asked[part] = asked_of(value, known, with_state=with_state, within=f"{within}{part}.")
        else:
            asked[part] = value
    return asked


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer state by name, as a checkpoint holds them."""
    return {"model": model.state_dict(), "optimizer": optimizer_state_of(model, optimizer)}


def load_state_of(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state that `state_of` returned, filled from a checkpoint, into model and optimizer."""
    model.load_state_dict(state["model"])
    load_optimizer_state_of(state["optimizer"], model, optimizer)


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, without its settings, by the names that its parameters have in `model`."""
    fill_in_state(optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {key: value for key, value in flat.items() if key.startswith(STATE)}


def load_optimizer_state_of(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the part of `optimizer_state_of` that a checkpoint has into the optimizer; the rest stays unchanged."""
    own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    set_optimizer_state_dict(model, optimizer, optim_state_dict={**own, **state}, options=_FLAT)
