"""Rejects, before the first step of a job that saves checkpoints, a model with state that cannot be saved."""

from __future__ import annotations

from torch import nn

from shardscope.spec import Job


def saves_state(job: Job) -> bool:
    """Return whether a job saves checkpoints, or copies of them in memory."""
    return job.saves_checkpoints or (job.recovery is not None and job.recovery.replica_every is not None)


def require_saveable(model: nn.Module) -> None:
    """Raise `CheckpointError` now, not at the first checkpoint, if extra state of a module cannot be saved."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            from shardscope.training.checkpoint.values import encode

            encode(f"model.{name}{'.' * bool(name)}_extra_state", module.get_extra_state())
