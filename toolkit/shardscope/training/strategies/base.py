"""The strategy of one rank: how it takes an optimizer step together with its peers.

Each rank makes one strategy, which lives as long as the training. The trainer calls, in this order,

    setup(model)                        once: wrap or cut the module, make the starting weights equal everywhere
    warm_up_buckets(loss_function)      once: fix the buckets where compressed gradients need the same ones throughout
    build_optimizer()                   once: over the parameters, or their shards, that this rank updates
    step(micro_batches, ...)            every step: forward, backward, exchange, clip, update; returns the loss
    synchronize(step)                   before an evaluation, a checkpoint and the end: wait for all ranks
    evaluating(), checkpoint_state()    read the run without changing the state that training continues from
    close()                             once: end threads

`RankStrategy.step` is the template that data-parallel strategies share; they define only how gradients are exchanged.
A strategy that cuts the model itself (a pipeline) or has no common step (a parameter server) overrides `step` whole.
Where gradients or weights are cut over several ranks, `reduce_squares` and `reduce_grad_square` make the norms that
LAMB, LARS and gradient clipping use those of the whole tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.spec import Job
from shardscope.training.compression import Carrier, build_compressor
from shardscope.training.context import RankContext
from shardscope.training.data import Batch, call
from shardscope.training.gradient_noise import GradientNoise, NoiseSample
from shardscope.training.memory import Held, MemoryWatch, held_by_default
from shardscope.training.observe import StandIns, unchanged
from shardscope.training.optim import LayerSignal, LayerwiseOptimizer, TrainedParameters, built_by
from shardscope.training.precision import Precision
from shardscope.training.sharding import ReduceSquares
from shardscope.training.strategies._relayout import by_parameter, left_of, shards_of, units_with_parameters

MicroBatch = Batch
LossFunction = Callable[[Any, Any], Tensor]


Predict = Callable[[Any], Any]
"""Function from inputs to outputs; it returns None on a rank that computes no outputs."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step on this rank.

    `loss` is the mean over the rank's own samples; None on a rank that computes no loss (a server, an inner stage).
    `noise` is set on steps whose gradient noise scale is measured.
    """

    loss: float | None
    grad_norm: float | None
    skipped: bool = False
    noise: NoiseSample | None = None


class RankStrategy(ABC):
    """Base class of the object that a strategy builds: the training of one rank."""

    settings: Any
    """The job's strategy settings."""
    lockstep: ClassVar[bool] = False
    """Whether a forward pass needs all ranks, so that in an evaluation each must run the same number of passes."""
    reduce_squares: ReduceSquares | None = None
    """Sums squared norms per layer over the ranks that hold other pieces of the same tensors; None if unsharded."""
    reduce_grad_square: ReduceSquares | None = None
    """Sums the squared norm of all gradients over the ranks that hold distinct ones; None if each rank holds all."""
    duplicate_grad_params: Sequence[nn.Parameter] = ()
    """Parameters of this rank whose gradients another rank counts already (tied copies)."""
    buffers_from: int = 0
    """The rank whose buffers evaluations and checkpoints use."""
    copies_of_gradients: int | None = None
    """Ranks that hold each piece of the mean gradient; None where all ranks hold all of it."""
    carrier: Carrier
    """Transport of compressed gradients; set by `wrap` where gradients can be compressed."""
    example: Callable[[], MicroBatch]
    """Returns a micro-batch, the same on every rank; set before `setup`, for strategies that try the model out."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job = job
        self.settings = job.strategy
        self.context = context
        self.precision = Precision(job.precision, context.device)
        self.memory = MemoryWatch(context.device)
        self.compressor = build_compressor(job)
        self.noise = GradientNoise(job, context) if job.record.noise_scale else None

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.job.strategy.name

    def setup(self, model: nn.Module) -> nn.Module:
        """Set up the model, which is on its device already, and return the module whose `forward` the step calls."""
        self.model = model
        self.module = self.wrap(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if self.noise is not None:
            self.watch_noise(self.noise)
        return self.module

    def watch_noise(self, noise: GradientNoise) -> None:
        """Pass every gradient of this rank's backward passes to `noise`."""
        noise.watch((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that trains in place of `model` and shares its parameters."""

    @property
    def data_rank(self) -> int | None:
        """Index of this rank's share of the global batch, below ``job.num_data_ranks``; None if it takes no data."""
        return self.context.rank

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the job's optimizer over the parameters that this rank updates."""
        compressor = self.compressor
        parameters = TrainedParameters(
            self.model.named_parameters(), reduce_squares=self.reduce_squares,
            reduce_grad_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            is_freezable=compressor is not None and compressor.freezes_variance,
        )  # fmt: skip
        optimizer = built_by(self.job.optimizer, parameters)
        if compressor is not None:
            compressor.attach(optimizer, dict(self.model.named_parameters()))
        return optimizer

    @property
    def reports_layer_signals(self) -> bool:
        """Whether this rank reports its optimizer's updates; only rank 0 does where all ranks' layers are the same."""
        return self.context.rank == 0 or self.job.compression.period > 1

    def layer_signals(self, optimizer: torch.optim.Optimizer) -> list[LayerSignal]:
        """Signals of the last update for the layers that this rank reports."""
        if not self.reports_layer_signals or not isinstance(optimizer, LayerwiseOptimizer):
            return []
        return optimizer.layer_signals()

    def stops_before(self, step: int, *, asked: bool) -> bool:  # noqa: ARG002
        """Whether this rank takes no further step; `asked` if it has seen the request to stop before `step`."""
        return asked

    def synchronize(self, step: int, *, ending: bool = False) -> int | None:  # noqa: ARG002
        """Wait for the other ranks after this rank's `step`; called before every joint operation.

        Args:
            step: The last step that this rank has taken.
            ending: Whether this rank takes no further step.

        Returns:
            The step that all ranks have taken. None where another rank is ending, so that the joint operation must be
            skipped (only where ranks can be at different steps).
        """
        return step

    def close(self) -> None:
        """End the threads that the strategy has started."""

    def no_exchange(self) -> AbstractContextManager[None]:
        """Context in which a backward pass only accumulates: gradients are exchanged after the last micro-batch."""
        return nullcontext()

    def finish_exchange(self) -> None:
        """Finish the exchange after the last backward pass; on return, every rank holds the mean gradient."""

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        """Take one optimizer step over this rank's micro-batches, which are of equal size."""
        optimizer.zero_grad(set_to_none=True)
        if self.compressor is not None:
            self.compressor.begin_step(self.context.meter.step)
        if self.noise is not None:
            self.noise.begin(self.context.meter.step)
        loss = self._accumulate(micro_batches, loss_function)
        self.finish_exchange()
        noise = None if self.noise is None else self._measure(self.noise)
        with self.context.meter.span("compute", "optimizer"):
            grad_norm, skipped = self.precision.update(
                optimizer, self.parameters, self.job.clip_norm,
                reduce_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            )  # fmt: skip
        if self.compressor is not None:
            self.compressor.after_step(self.parameters, self.carrier, self.context.meter.step)
        return StepResult(loss, grad_norm, skipped, noise)

    def _measure(self, noise: GradientNoise) -> NoiseSample | None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        scale, copies = self.precision.loss_scale, self.copies_of_gradients
        return noise.finish(gradients, loss_scale=scale, copies=copies)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float:
        total: Tensor | None = None
        last = len(micro_batches) - 1
        for i, (inputs, targets) in enumerate(micro_batches):
            with nullcontext() if i == last else self.no_exchange():
                loss = self._forward_backward(inputs, targets, loss_function, len(micro_batches))
            total = loss if total is None else total + loss
        assert total is not None
        return float(total)

    def _forward_backward(self, inputs: Any, targets: Any, loss_function: LossFunction, parts: int) -> Tensor:
        meter = self.context.meter
        with meter.span("compute", "forward"), self.precision.autocast():
            loss = loss_function(call(self.module, inputs), targets) / parts
        self.memory.sample()  # here all activations are held
        with meter.backward_span():
            self.precision.scale(loss).backward()
        self.memory.sample()  # and here all gradients
        return loss.detach()

    def averaged(self) -> StandIns:
        """Map each parameter that the ranks train separately to its mean over all ranks; called by all ranks.

        Empty where all ranks hold the same values.
        """
        return {} if self.compressor is None else self.compressor.averaged(self.carrier)

    def consensus(self) -> StandIns:
        """Tensors that represent the whole run, keyed by this rank's own tensors; called by all ranks.

        Parameters that the ranks train separately are averaged. Buffers, such as a batch norm's running means, are
        those of the first rank that trains, as under DistributedDataParallel.
        """
        if self.context.group is None:
            return self.averaged()
        buffers = {buffer: _copied(buffer) for buffer in self.model.buffers()}
        for copy in buffers.values():
            if copy.layout == torch.strided:  # backends send no other layout, so each rank uses its own
                dist.broadcast(copy, src=self.buffers_from)
        return {**self.averaged(), **buffers}

    @contextmanager
    def evaluating(self) -> Iterator[Predict]:
        """Context in which the model holds the run's consensus, in evaluation mode and without gradients.

        The model is restored afterwards.

        Yields:
            A function from inputs to outputs, or to None on a rank that computes no outputs (an inner stage).
        """
        model = self.plain_module
        with unchanged(model, self.consensus()), torch.no_grad(), self.precision.autocast():
            model.eval()
            yield partial(call, model)

    @property
    def plain_module(self) -> nn.Module:
        """The user's own module, without wrapping."""
        module = self.module
        return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters by name, unsharded, on this rank; called by all ranks."""
        averaged = self.averaged()
        return {name: averaged.get(p, p) for name, p in self.plain_module.named_parameters()}

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """Tensors that this rank holds between and within steps, by kind; called at any moment of a measured step.

        A strategy with its own buffers adds them here. It reports tensors that live only between the samples that
        `step` takes (after each forward and backward pass) to ``self.memory.hold`` when it allocates them.
        """
        held = held_by_default(self.model, optimizer)
        kept = [] if self.compressor is None else self.compressor.work_space
        return {**held, "buffers": [*held["buffers"], *kept]}

    def checkpoint_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer as checkpoints hold them: whole tensors or DTensors by name."""
        from shardscope.training.checkpoint import (
            optimizer_state_of,  # imports much; only runs that save need it
        )

        return {"model": self.model_state(), "optimizer": optimizer_state_of(self.model, optimizer)}

    def model_state(self) -> dict[str, Any]:
        """The run's consensus under the names of `state_dict`, the same on all ranks; called by all ranks."""
        shared = self.consensus()
        own = self.model.state_dict(keep_vars=True)
        return {name: shared.get(v, v).detach() if isinstance(v, Tensor) else v for name, v in own.items()}

    def state_to_fill(self, optimizer: torch.optim.Optimizer, known: set[str]) -> dict[str, Any]:  # noqa: ARG002
        """`checkpoint_state` in the form that a checkpoint with the keys `known` can fill; called by all ranks."""
        return self.checkpoint_state(optimizer)

    # The compressor's state, which is saved in addition.

    @property
    def layout(self) -> str:
        """Name of the layout of gradients on ranks; state saved under another layout must be converted."""
        return f"{self.name} {self.context.world_size}"

    def compressor_state(self) -> dict[str, Tensor]:
        """Compressor state that this rank must restore on resume, by name."""
        assert self.compressor is not None
        return self.compressor.state_dict()

    def load_compressor_state(self, state: dict[str, Tensor]) -> None:
        """Restore the state that `compressor_state` returned."""
        assert self.compressor is not None
        self.compressor.load_state_dict(state)

    def reshard_compressor_state(self, state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
        """Convert compressor state saved under another `layout` to this strategy's layout: by parameter."""
        old = shards_of(layout)
        if old is None:
            return state
        return by_parameter(state, units_with_parameters(self.model, besides=left_of(layout)), old)

    @property
    def gradient_order(self) -> list[str]:
        """Names of the trained parameters in the order of their gradients, where the exchange depends on it."""
        return []

    def follow_order(self, names: list[str]) -> None:
        """Before the first step of a resumed run: exchange gradients in the order `names` of the run before."""

    def warm_up_buckets(self, loss_function: LossFunction) -> None:
        """After `setup`: make the lasting changes of a first step in advance, and leave the model unchanged."""

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load the state that `checkpoint_state` returned, filled from a checkpoint."""
        from shardscope.training.checkpoint import load_state_of

        load_state_of(state, self.model, optimizer)


def _copied(buffer: Tensor) -> Tensor:
    """Return a copy that can be sent: contiguous, if its layout is strided."""
    is_strided = buffer.layout == torch.strided
    return buffer.clone(memory_format=torch.contiguous_format) if is_strided else buffer.clone()
