"""Observation of a training loop that belongs to the user: `observe` records it as a run.

    with ss.observe(model, optimizer) as run:
        ...  # plain torch, DDP, FSDP2, Lightning's `trainer.fit` or Hugging Face's `trainer.train`, under torchrun too

`_loop` hooks into the model's forward and backward passes and the optimizer's updates, `_collectives` into torch's
collectives; `_recorder` makes events of what they report, `_session` keeps the run directory.
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
    `ss.runs()`, `run.metrics()`, the labs and reports show it, and ``ss.predict(run.job)`` gives the bytes and model
    states that formulas expect. It cannot be launched, stopped or resumed from here: the script is not part of it.

    The script computes exactly what it computes without: losses and weights are equal to the bit. A step ends when
    `optimizer` has stepped. Its loss is the sum of the numbers from which `backward` was called. Steps that a
    `GradScaler` skips count with the next one, and losses contain its scale.

    Args:
        model: The model whose forward passes are recorded, wrapped or not. For Lightning, the `LightningModule`.
        optimizer: The optimizer whose steps are the steps of the run. None takes the first that updates parameters of
            `model`, for trainers that make their own.
        name: Name of the run directory; by default made from the wrapper and the model's class.
        root: Folder for the run directory; None means ``$SHARDSCOPE_RUNS`` or ``./runs``.
        record: Which steps are recorded with spans (`spans_first`, `spans_every`) and with memory by kind
            (`memory_first`, `memory_every`). Models that `torch.compile` traces are recorded without the latter.

    Returns:
        A context manager that gives the run. If `torch.distributed` is initialised only inside the block, ranks other
        than 0 know the run's directory from the first step on.

    Raises:
        SpecError: The model or optimizer is not one of torch's, or a training loop is already observed.
        LaunchError: The run directory cannot be written.

    Example:
        >>> with ss.observe(model, optimizer) as run:  # doctest: +SKIP
        ...     train(model, optimizer)
        >>> run.metrics()  # doctest: +SKIP
    """
    from shardscope.runtime.observe._session import Session  # needs torch

    return Session(model, optimizer, name=name, root=root, record=record or Record())
