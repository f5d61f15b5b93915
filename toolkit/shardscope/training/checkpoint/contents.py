"""Contents of a checkpoint: model and optimizer state by name, the position in the data, and random states.

No settings are read from a checkpoint: a resumed run uses the settings of its job. If the job's optimizer
differs from the checkpoint's, the saved optimizer state is loaded only when both optimizers have the same
kind of state (`Optimizer.carries`; for example, both AdamW and LAMB have moments). Otherwise the optimizer
starts with a new state. Compressor state is loaded only by the same method (see `compressor_state`). Training
continues after the same number of samples (`GlobalSampler.resume`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardscope.spec import Job
from shardscope.training.checkpoint.compressor_state import compressor_state, method_of
from shardscope.training.random_state import random_state
from shardscope.training.strategies.base import RankStrategy

RANK = "rank-"
"""Key prefix for each rank's own model and optimizer, in strategies whose ranks train different models."""
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
        "settings": _settings_of(strategy.job),
    }  # fmt: skip


def _settings_of(job: Job) -> str:
    """Return the settings on which the kinds of entries in the optimizer's state may depend."""
    settings = {key: value for key, value in job.optimizer.settings.items() if key != "lr"}
    return json.dumps([job.optimizer.name, settings], sort_keys=True, default=repr)


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
