"""What a checkpoint holds: model and optimizer by name, the run's place in its data, and what is random.

The job that goes on may have other settings, and they hold: no setting comes from a checkpoint. What an optimizer
carries is taken up by any that carries the same (`Optimizer.carries`: AdamW and LAMB take up each other's moments) and
starts afresh elsewhere; what a compressor remembers is its own method's (`remembered`); the data go on after as many
samples (`GlobalSampler.go_on`).
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
from shardscope.training.checkpoint.remembered import method_of, remembered
from shardscope.training.optim.state import fill_in_state
from shardscope.training.random_state import random_state
from shardscope.training.strategies.base import RankStrategy

STATE = "state."
RANK = "rank-"
"""Under which a strategy whose ranks differ keeps each rank's own model and optimizer."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_FROZEN = "frozen "
"""Of moments the second of which stands still, so that it no longer counts the steps that the first does."""


def contents_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """All that this rank saves after `step`, with where the `data` are; called by all ranks."""
    context = strategy.context
    return {
        **strategy.checkpoint_state(optimizer),
        **remembered(strategy),
        "extra": extra_of(strategy, optimizer, step, data),
        random_key(context.rank): random_state(context.device),
    }


def random_key(rank: int) -> str:
    """Under which a rank's random state is saved."""
    return f"random-{rank}"


def extra_of(
    strategy: RankStrategy, optimizer: torch.optim.Optimizer, step: int, data: Mapping[str, int]
) -> dict[str, Any]:
    """What is saved beside tensors, the same on every rank."""
    job, spec = strategy.job, strategy.job.optimizer
    frozen = _FROZEN if getattr(optimizer, "frozen_after", None) is not None else ""
    return {
        "step": step, "data": dict(data), "precision": strategy.precision.state_dict(), "layout": strategy.layout,
        "optimizer": spec.name, "carries": f"{frozen}{spec.carries}", "method": method_of(job.compression),
        "gradient_order": strategy.gradient_order,
    }  # fmt: skip


def what_fits(job: Job, extra: Mapping[str, Any]) -> tuple[bool, list[str]]:
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


def asked_of(state: dict[str, Any], known: set[str], *, with_state: bool, within: str = "") -> dict[str, Any]:
    """`state` without what is not to be read: optimizer state that does not fit or is not there."""
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
    """Model and optimizer by name, as a checkpoint holds them."""
    return {"model": model.state_dict(), "optimizer": optimizer_state_of(model, optimizer)}


def load_state_of(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put what `state_of` gave, filled from a checkpoint, into model and optimizer."""
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
    """Put what of `optimizer_state_of` came from a checkpoint into the optimizer; the rest stays as it is."""
    own = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    set_optimizer_state_dict(model, optimizer, optim_state_dict={**own, **state}, options=_FLAT)
