"""What a strategy is: how a rank takes one optimizer step together with its peers.

A strategy is made once a rank and lives as long as the training. The trainer calls, in this order,

    setup(model)                        once: wrap the module, make the starting weights equal everywhere
    step(micro_batches, ...)            every step: forward, backward, exchange, clip, update; returns the loss

`Strategy.step` is the template that data-parallel strategies share; they say only how gradients are exchanged. A
strategy that cuts the model itself (a pipeline) overrides `step` whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.memory import MemoryWatch
from shardscope.training.precision import Precision

MicroBatch = tuple[Tensor, Tensor]
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step left behind on this rank. `loss` is the mean over the rank's own samples."""

    loss: float
    grad_norm: float | None
    skipped: bool = False


class Strategy(ABC):
    """Base of all strategies. Subclasses set `name` to the `kind` of their spec."""

    name: ClassVar[str]

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job = job
        self.context = context
        self.precision = Precision(job.precision, context.device)
        self.memory = MemoryWatch(context.device)

    def setup(self, model: nn.Module) -> nn.Module:
        """Take the model, on its device; returns the module whose `forward` the step calls."""
        self.module = self.wrap(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        return self.module

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that trains in place of `model`, sharing its parameters."""

    def no_exchange(self) -> AbstractContextManager[None]:
        """Inside, a backward pass only accumulates: gradients are exchanged after the last micro-batch."""
        return nullcontext()

    def finish_exchange(self) -> None:
        """After the last backward pass: when it returns, every rank holds the mean gradient."""

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches, which are of equal size."""
        optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(micro_batches, loss_function)
        self.finish_exchange()
        with self.context.meter.span("compute", "optimizer"):
            grad_norm, skipped = self.precision.update(optimizer, self.parameters, self.job.clip_norm)
        return StepResult(loss, grad_norm, skipped)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float:
        total: Tensor | None = None
        last = len(micro_batches) - 1
        for i, (inputs, targets) in enumerate(micro_batches):
            with nullcontext() if i == last else self.no_exchange():
                loss = self._forward_backward(inputs, targets, loss_function, len(micro_batches))
            total = loss if total is None else total + loss
        assert total is not None
        return float(total)

    def _forward_backward(
        self, inputs: Tensor, targets: Tensor, loss_function: LossFunction, parts: int
    ) -> Tensor:
        meter = self.context.meter
        with meter.span("compute", "forward"), self.precision.autocast():
            loss = loss_function(self.module(inputs), targets) / parts
        self.memory.sample()  # here all activations are held
        with meter.backward_span():
            self.precision.scale(loss).backward()
        self.memory.sample()  # and here all gradients
        return loss.detach()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module in evaluation mode, without gradients."""
        model = self.plain_module
        model.eval()
        try:
            with torch.no_grad(), self.precision.autocast():
                yield model
        finally:
            model.train()

    @property
    def plain_module(self) -> nn.Module:
        """The user's own module, without wrapping."""
        module = self.module
        return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters by name, whole, on this rank; called by all ranks."""
        return dict(self.plain_module.named_parameters())
