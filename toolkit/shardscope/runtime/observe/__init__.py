"""Observation of the user's own training loop: `observe` records it as a run.

    with ss.observe(model, optimizer) as run:
        ...  # plain torch, DDP, FSDP2, Lightning's `trainer.fit` or Hugging Face's `trainer.train`, under torchrun too

`_loop` hooks into the model's forward and backward passes and the optimizer's updates, `_collectives` into torch's
collectives; `_recorder` turns their reports into events, and `_session` manages the run directory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.runtime.run import Run
from shardscope.spec import Record

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def observe(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    name: str | None = None,
    root: str | Path | None = None,
    record: Record | None = None,
) -> AbstractContextManager[Run]:
    """Record the training inside a ``with`` block as a run; nothing else in the script changes.

    Each rank calls it once. The run has steps, spans, bytes by collective and memory by kind like any other run, so
    `ss.runs()`, `run.metrics()`, the labs and reports show it, and ``ss.predict(run.job)`` predicts its bytes and model
    states. It cannot be launched, stopped or resumed from Shardscope: the script is not part of the run.

    The results of the script do not change: losses and weights are bit-identical. A step ends when `optimizer` has
    stepped. Its loss is the sum of the scalars on which `backward` was called. A step that a `GradScaler` skips is
    counted as part of the next one, and losses include the scale of the `GradScaler`.

    Args:
        model: The model whose forward passes are recorded, wrapped or not. For Lightning, the `LightningModule`.
        optimizer: The optimizer whose steps are the steps of the run. None takes the first that updates parameters of
            `model`, for trainers that create their own.
        name: Name of the run directory; by default made from the wrapper and the model's class.
        root: Folder for the run directory; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
        record: Which steps are recorded with spans (`spans_first`, `spans_every`) and with memory by kind
            (`memory_first`, `memory_every`). Models that `torch.compile` traces are recorded without memory by kind.

    Returns:
        A context manager that yields the run. If `torch.distributed` is initialised only inside the block, ranks other
        than 0 know the run's directory from the first step on.

    Raises:
        SpecError: The model or optimizer is not one of torch's, or a training loop is already being observed.
        LaunchError: The run directory cannot be written.

    Example:
        >>> with ss.observe(model, optimizer) as run:  # doctest: +SKIP
        ...     train(model, optimizer)
        >>> run.metrics()  # doctest: +SKIP
    """
    from shardscope.runtime.observe._session import ObserveSession  # needs torch

    return ObserveSession(model, optimizer, name=name, root=root, record=record or Record())
