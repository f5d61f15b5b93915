"""Record the user's own training loop as a run, with `observe`.

    with ss.observe(model, optimizer) as run:
        ...  # plain torch, DDP, FSDP2, Lightning's `trainer.fit` or Hugging Face's `trainer.train`, under torchrun too

`_loop` hooks into the model's forward and backward passes and the optimizer's updates, `_collectives` into torch's
collectives; `_recorder` turns their reports into events, and `_session` manages the run directory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope._experimental import experimental
from shardscope.runtime.record.run import Run
from shardscope.spec import Record

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@experimental
def observe(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    name: str | None = None,
    root: str | Path | None = None,
    record: Record | None = None,
) -> AbstractContextManager[Run]:
    """Record the training inside a ``with`` block as a run; nothing else in the script changes.

    Each rank calls `observe` once. The run has steps, spans, bytes by collective and memory by type like any other run,
    so `ss.runs()`, `run.metrics()`, the labs and reports show it, and ``ss.predict(run.job)`` predicts its traffic and
    its model states, unless layers are divided over ranks, as by `parallelize_module`. Shardscope cannot launch, stop
    or resume the run, because the script is not part of it.

    The results of the script do not change: losses and weights are bit-identical. A step ends when `optimizer` has
    stepped, or when a `GradScaler` has skipped its update (`skipped` in the events). The loss of a step is the sum of
    the scalars on which `backward` was called and that depend on an output of `model`; if `GradScaler.scale` returned
    the scalar, its value before scaling counts. Divide a loss before it is scaled, not after. Other models trained in
    the same block do not affect the loss, but their traffic is part of the run's traffic.

    Copies of `model` made inside the block, by `copy.deepcopy` or `torch.save`, are not observed. A compiled model runs
    as it does outside: ``torch.compile(model)``, or `model` after ``model.compile()``, is recorded like any other.
    Forward passes are not recorded if `torch.compile` traces them as part of something larger, or if the model's
    `compile` is called inside the block; their steps then have no samples, but everything else is recorded.

    Args:
        model: The model whose forward passes are recorded, wrapped or not. For Lightning, the `LightningModule`.
        optimizer: The optimizer whose steps are the steps of the run. None uses the first optimizer that updates
            parameters of `model`, for trainers that create their own.
        name: Name of the run; None derives it from the wrapper (such as DDP) and the model's class.
        root: Folder for the run directory; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        record: Which steps are recorded with spans (`spans_first`, `spans_every`) and with memory by type
            (`memory_first`, `memory_every`). Models that `torch.compile` traces are recorded without memory by type.

    Returns:
        A context manager that yields the run. If `torch.distributed` is initialised only inside the block, `run.path`
        is known on ranks other than 0 from the first step on.

    Raises:
        SpecError: `model` is not an `nn.Module`, `optimizer` is not a torch optimizer, or a loop is already being
            observed.
        LaunchError: The run directory cannot be written.

    Example:
        >>> with ss.observe(model, optimizer) as run:  # doctest: +SKIP
        ...     train(model, optimizer)
        >>> run.metrics()  # doctest: +SKIP
    """
    from shardscope.runtime.observe._session import ObserveSession  # needs torch

    return ObserveSession(model, optimizer, name=name, root=root, record=record or Record())
