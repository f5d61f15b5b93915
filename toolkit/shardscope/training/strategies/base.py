"""Base class of strategies: how one rank takes an optimizer step together with the other ranks.

Each rank builds one strategy object, which exists until training ends. The trainer calls its methods in this order:

    divide_model(model)                 once: keep this rank's part of the model, if it is divided over a tensor group
    setup(model)                        once: wrap or split the model, and give all ranks the same initial weights
    warm_up_buckets(loss_function)      once: make the buckets final, if compressor state depends on them
    build_optimizer()                   once: create the optimizer for the parameters or shards that this rank updates
    step(micro_batches, ...)            every step: forward, backward, exchange, clip, update; returns the loss
                                        (begin_step, passes, finish_exchange, update, end_step)
    synchronize(step)                   before an evaluation, a checkpoint and the end: wait for all ranks
    evaluating(), checkpoint_state()    read the model and the state without changing them
    close()                             once: stop threads

Data-parallel strategies share `RankStrategy.step`, and define only how gradients are exchanged. Strategies that split
the model into stages (a pipeline) or whose ranks do not step together (a parameter server) override `step`.

A strategy can also be the data axis of an object that runs the passes itself, such as a pipeline. That object calls
`adopt` in place of `setup`, and in every step begin_step, finish_exchange and end_step.

If gradients or weights are sharded over ranks, `reduce_squares` and `reduce_grad_square` sum squared norms over the
ranks, so that LAMB, LARS and gradient clipping use the norms of whole tensors.
"""
# Long because it is one protocol: all that a trainer asks of the strategy on a rank.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.training.compression import Carrier, build_compressor
from shardscope.training.context import RankContext
from shardscope.training.data import Batch, call
from shardscope.training.expert_split import ExpertSplit
from shardscope.training.gradient_noise import GradientNoise, NoiseSample
from shardscope.training.loss import zero_of
from shardscope.training.memory import Held, MemoryWatch, held_by_default
from shardscope.training.observe import StandIns, unchanged
from shardscope.training.optim import LayerSignal, LayerwiseOptimizer, TrainedParameters, built_by
from shardscope.training.optim.holding import Holding, SavedCheckpoint, digest_of
from shardscope.training.optim.state import NamedOptimizer
from shardscope.training.precision import Precision
from shardscope.training.sequence import SequenceSplit
from shardscope.training.sharding import ReduceSquares, TensorPart, start_alike
from shardscope.training.strategies._divided import TensorHolding, divide_checked
from shardscope.training.strategies._relayout import (
    by_parameter,
    root_blocks,
    shards_of,
    units_with_parameters,
)
from shardscope.training.strategies._sequence_check import install_checked
from shardscope.training.strategies.step_result import StepResult
from shardscope.training.tensor import TensorAxis, TensorSplit
from shardscope.training.tensor.same_batch import COMPARED_EVERY, require_same_batch

DIVIDED_SUFFIX = " x "
"""Precedes what divides the model, such as tensor ranks, in the name of a layout."""
MicroBatch = Batch
Named = tuple[str, nn.Parameter]
"""A parameter with its name in the model."""
LossFunction = Callable[[Any, Any], Tensor]


Predict = Callable[[Any], Any]
"""Function from a model's inputs to its outputs; it returns None on a rank that computes no outputs."""


class RankStrategy(ABC):
    """Base class of the object that trains a model on one rank; built by `Strategy.build`."""

    settings: Any
    """The job's strategy settings."""
    tensor_split: TensorSplit | None = None
    """How the model is divided over a tensor group; None if the strategy's ranks have whole models."""
    expert_split: ExpertSplit | None = None
    """How the experts of a model are distributed over an expert group; None if each rank has all experts."""
    of_experts: RankStrategy | None = None
    """Strategy that averages the gradients of divided parameters over the ranks that hold the same part, if ranks of
    the data axis hold different ones, as of experts; None if all data ranks have the same parameters."""
    sequence_split: SequenceSplit | None = None
    """How sequences are divided over a context group; None if ranks have whole sequences."""
    trained_as: Callable[[nn.Module], nn.Module] = staticmethod(lambda model: model)
    """Function that returns a module which calls the layers of a model as the passes of this strategy do."""
    lockstep: bool = False
    """Whether a forward pass communicates with other ranks, such as those of a tensor group, so that in an evaluation
    every rank must run the same number of passes."""
    reduce_squares: ReduceSquares | None = None
    """Function that sums the squared norm of each layer over the ranks that have its shards; None if not sharded."""
    reduce_grad_square: ReduceSquares | None = None
    """Function that sums the squared norm of all gradients over the ranks that have different gradients; None if each
    rank has all of them."""
    duplicate_grad_params: Sequence[nn.Parameter] = ()
    """Parameters of this rank whose gradients are already counted on another rank, such as copies of tied weights."""
    shares_state: ClassVar[bool] = True
    """Whether all ranks that have a parameter take the same steps with the same optimizer state, and save it once."""
    buffers_from: int = 0
    """The rank whose model buffers are used in evaluations and checkpoints."""
    copies_of_gradients: int | None = None
    """Number of ranks that have each piece of the mean gradient; None if all ranks have all of it."""
    carrier: Carrier
    """Communication functions for the compressor; set by `wrap` if the strategy supports compression."""
    sample_weight: float = 1.0
    """Number of this rank's samples in a step, relative to the mean over the ranks that share the batch."""
    loss_weights: Sequence[float] | None = None
    """Factor of the loss of each micro-batch in this step, so that the mean over ranks is the mean over the batch (see
    `BatchWeights`); None if micro-batches have equal weights and the rank's weight is `sample_weight`."""
    roots: Sequence[nn.Module] = ()
    """The modules that hold adopted parameters (see `adopt`), which need not be part of the model."""
    repeated: Collection[str] = ()
    """Names of adopted parameters that several modules of a rank hold."""
    _divided: Collection[str] = ()
    """Names of parameters of which each tensor rank has a part."""
    example: Callable[[], MicroBatch]
    """Function that returns a micro-batch, the same on every rank, for strategies that test the model before training;
    set before `setup` is called."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job = job
        self.settings = job.strategy
        self.context = context
        self.precision = Precision(job.precision, context.device)
        self.memory = MemoryWatch(context.device)
        self.compressor = build_compressor(job)
        self.noise = GradientNoise(job, context) if job.record.noise_scale else None

    @property
    def of_data(self) -> RankStrategy:
        """The strategy of the ranks that share the batch: this one, unless it is made of others."""
        return self

    @property
    def random_index(self) -> int:
        """Index of the random numbers that this rank draws, such as for dropout; those of a tensor group are equal."""
        return self.context.rank

    @property
    def same_samples(self) -> TensorAxis | None:
        """The ranks that compute with the same samples as this one: those of its tensor group; None if none do."""
        return None if self.tensor_split is None else self.tensor_split.axis

    @property
    def splits(self) -> list[TensorSplit]:
        """How the model is divided over other ranks than those of the data axis; the last one was made first."""
        return [split for split in (self.expert_split, self.tensor_split) if split is not None]

    @property
    def _same_batch(self) -> list[TensorAxis]:
        """The groups whose ranks read the same part of each batch: those of its tensor and context axes."""
        sequence = None if self.sequence_split is None else self.sequence_split.axis
        return [axis for axis in (self.same_samples, sequence) if axis is not None]

    @property
    def ranks_per_sample(self) -> int:
        """Number of context ranks over which each sample is divided; to the strategy, they are data ranks."""
        return 1 if self.sequence_split is None else self.sequence_split.axis.size

    @property
    def has_own_tokens(self) -> bool:
        """Whether no earlier rank of this one's tensor group has the same tokens."""
        alike = self.same_samples
        return self.data_rank is not None and (alike is None or not alike.rank)

    @property
    def is_first_reader(self) -> bool:
        """Whether this rank is the first of those that read the same part of each batch, and reports on it."""
        return self.data_rank is not None and not any(axis.rank for axis in self._same_batch)

    @property
    def all_ranks(self) -> RankContext:
        """The context of all ranks of the job; `context` describes the ranks of the strategy's own axis."""
        return self.context.whole

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.job.strategy.name

    def setup(self, model: nn.Module) -> nn.Module:
        """Set up the model, which is already on its device, and return the module whose `forward` the step calls."""
        self.model = model
        self.set_experts_apart()
        self.module = self.wrap(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if self.noise is not None:
            self.watch_noise(self.noise)
        return self.module

    def set_experts_apart(self) -> None:
        """Let `of_experts` exchange the gradients of this rank's experts, if there are other ones on other ranks."""
        if self.of_experts is not None and self.expert_split is not None:
            self.of_experts.adopt(self.model, *self.expert_split.set_apart(self.model))

    def own_parameters(self, model: nn.Module) -> list[Named]:
        """Return the parameters of a model that the ranks of this axis share: all but those of `of_experts`."""
        left = () if self.expert_split is None else self.expert_split.cuts
        return [(name, parameter) for name, parameter in model.named_parameters() if name not in left]

    def adopt(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        named: Sequence[Named],
        *,
        repeated: Collection[str] = (),
    ) -> None:
        """Take parameters whose passes another object runs, in place of `setup`; called by all ranks of the axis.

        Afterwards, `finish_exchange` averages the gradients that the passes of a step have accumulated in them.

        Args:
            model: The model that gives the parameters their names. Its other parameters may be on the meta device.
            roots: The modules that hold the parameters, each of which is called by itself in a pass.
            named: The parameters to take, by name, in the model's order.
            repeated: Names of parameters that several modules of a rank hold, equal on all ranks that have a part of
                the model.
        """
        self.model = self.module = model
        self.roots, self.repeated = roots, repeated
        self.parameters = [parameter for _, parameter in named if parameter.requires_grad]
        if self.context.group is None:
            return
        for tensor in [*(p for _, p in named), *(buffer for root in roots for buffer in root.buffers())]:
            dist.broadcast(tensor.detach(), group=self.context.group, group_src=0)
        self.take(named, roots)

    def take(self, named: Sequence[Named], roots: Sequence[nn.Module]) -> None:  # noqa: ARG002
        """Prepare the exchange of the gradients of adopted parameters; see `adopt`."""
        raise SpecError(
            f"strategy={self.name!r} cannot exchange gradients of passes that another axis runs; use "
            "strategy.data='ring'"
        )

    def before_backward(self, root: nn.Module, *, is_split: bool) -> None:
        """Prepare an adopted module for a backward pass, which may be split into one for inputs and one for weights."""

    def after_backward(
        self, root: nn.Module, *, has_weights: bool, is_last: bool, is_followed: bool = False
    ) -> None:
        """Take the gradients of one micro-batch from an adopted module, after a backward pass for inputs or weights.

        Args:
            root: The module.
            has_weights: Whether the pass has computed the gradients of weights.
            is_last: Whether it is the module's last pass in a step.
            is_followed: Whether this rank goes on with a backward pass for weights of the same module.
        """

    def divide_model(self, model: nn.Module) -> None:
        """Give all ranks the same initial weights, and divide the model and its sequences, if there are such groups.

        Called by all ranks before `setup`, when `example` is set.
        """
        tensor, sequence, experts = self.tensor_split, self.sequence_split, self.expert_split
        if tensor is None and sequence is None and experts is None:
            return
        start_alike(model)
        self.lockstep = True
        if tensor is not None or sequence is not None:
            self._divide_checked(model, tensor, sequence)
        if experts is not None:
            experts.divide(model)

    def _divide_checked(
        self, model: nn.Module, tensor: TensorSplit | None, sequence: SequenceSplit | None
    ) -> None:
        example = self.example()
        self.require_same_batch([example])
        if tensor is not None:
            divide_checked(model, tensor, example[0])
            self.of_data._divided = tensor.cuts  # noqa: SLF001 - the same class
        if sequence is not None:
            install_checked(self.trained_as(model), sequence, example[0])
            whole, divided = self.example, sequence
            self.example = lambda: divided.part(whole())

    def compares_batches(self, step: int, first: int) -> bool:
        """Return whether ranks compare batches in a step: in the first one, and with such groups now and then."""
        return step == first or (bool(self._same_batch) and (step - first) % COMPARED_EVERY == 0)

    def require_same_batch(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Refuse whole micro-batches that differ between ranks of one replica; called by all ranks."""
        for axis in self._same_batch:
            require_same_batch(axis, micro_batches)

    def join_axes(self) -> None:
        """Make norms and overflow flags those of the whole model; called after `setup`."""
        splits = self.splits
        if self.of_experts is not None and self.of_data.reduce_grad_square is not None:
            splits = splits[1:]  # sums over all data ranks include the shards of all experts
        if not splits:
            return
        for split in splits:
            self.reduce_squares = split.layer_sums(self.reduce_squares)
            self.reduce_grad_square = split.grad_sum(self.reduce_grad_square)
            self.precision.share_overflow = split.largest(self.precision.share_overflow)
        # the first rank counts the gradients of layers that all ranks have whole
        repeated = [
            parameter
            for name, parameter in self.updated_parameters
            if any(split.axis.rank and name not in split.cuts for split in splits)
        ]
        self.duplicate_grad_params = [*self.duplicate_grad_params, *repeated]

    @property
    def updated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The tensors that this rank's optimizer updates, by the names of the parameters."""
        return [
            (name, parameter) for name, parameter in self.model.named_parameters() if not parameter.is_meta
        ]

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Numbers of dimensions of parameters that the optimizer updates in another shape, by name."""
        return {}

    def watch_noise(self, noise: GradientNoise) -> None:
        """Register hooks that pass the gradients of each backward pass on this rank to `noise`."""
        noise.watch((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to train instead of `model`; it shares the parameters of `model`."""

    @property
    def shares_parts(self) -> bool:
        """Whether ranks share the parts of each global batch, so that `batch_parts` are not known in advance."""
        return False

    @property
    def data_rank(self) -> int | None:
        """Index of this rank's part of the global batch, below ``job.num_data_ranks``; None if it reads no data."""
        return self.context.rank // self.ranks_per_sample

    @property
    def part_number(self) -> int:
        """Index of the parameter shard that this rank updates; ranks with the same shard apply the same updates."""
        return 0

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the job's optimizer for the parameters that this rank updates."""
        compressor = self.compressor
        parameters = TrainedParameters(
            self.updated_parameters, reduce_squares=self.reduce_squares,
            reduce_grad_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            is_freezable=compressor is not None and compressor.freezes_variance,
        )  # fmt: skip
        optimizer = built_by(self.job.optimizer, parameters)
        if compressor is not None:
            compressor.attach(optimizer, dict(self.model.named_parameters()))
        return optimizer

    @property
    def reports_layer_signals(self) -> bool:
        """Whether this rank reports its trust ratios; if they are the same on all ranks, only rank 0 does."""
        return self.all_ranks.rank == 0 or self.job.compression.period > 1

    def layer_signals(self, optimizer: torch.optim.Optimizer) -> list[LayerSignal]:
        """Return trust ratios and norms of the last update for the layers that this rank reports."""
        if not self.reports_layer_signals or not isinstance(optimizer, LayerwiseOptimizer):
            return []
        return optimizer.layer_signals()

    def described_transport(self) -> dict[str, str]:
        """Return the transport and the reason for its choice, for the ``start`` event; empty for a single rank."""
        return self.all_ranks.described_transport()

    def batch_parts(self, step: int) -> Iterator[int | None]:  # noqa: ARG002
        """Yield the index of the part of the global batch for each gradient that this rank computes in `step`.

        That is `data_rank`, once, unless ranks share the parts of a step. A rank that reads no data yields None.
        """
        yield self.data_rank

    def stops_before(self, step: int, *, asked: bool) -> bool:  # noqa: ARG002
        """Return whether this rank stops before `step`; `asked` is whether it has received a request to stop."""
        return asked

    def synchronize(self, step: int, *, ending: bool = False) -> int | None:  # noqa: ARG002
        """Wait for the other ranks; called before each operation that needs all ranks, such as an evaluation.

        Args:
            step: The last step that this rank has taken.
            ending: Whether this rank will take no further step.

        Returns:
            The step that all ranks have taken. If ranks can be at different steps, None means that another rank is
            ending, and the operation must be skipped.
        """
        return step

    def close(self) -> None:
        """Stop the threads that the strategy has started."""
        if self.of_experts is not None:
            self.of_experts.close()

    def no_exchange(self) -> AbstractContextManager[None]:
        """Return a context manager for the backward passes of all micro-batches but the last.

        Within it, a backward pass accumulates gradients without exchanging them.
        """
        return nullcontext()

    def begin_step(self, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> None:  # noqa: ARG002
        """Forget the gradients of the last step, before the passes of a step with `num_micro_batches`."""
        optimizer.zero_grad(set_to_none=True)
        if self.compressor is not None:
            self.compressor.begin_step(self.context.meter.step)

    def finish_exchange(self) -> None:
        """Complete the exchange after the last backward pass; when it returns, every rank has the mean gradient."""

    def end_step(self, *, skipped: bool) -> None:  # noqa: ARG002
        """Give all ranks the updated parameters; `skipped` is whether the update was skipped."""
        if self.compressor is not None:
            self.compressor.after_step(self.parameters, self.carrier, self.context.meter.step)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        """Take one optimizer step on this rank's micro-batches, which have equal sizes; see `loss_weights`."""
        self.begin_step(optimizer, len(micro_batches))
        if self.of_experts is not None:
            self.of_experts.begin_step(optimizer, len(micro_batches))
        if self.noise is not None:
            self.noise.begin(self.context.meter.step)
        loss = self._accumulate(micro_batches, loss_function)
        self.finish_exchange()
        if self.of_experts is not None and self.expert_split is not None:
            self.of_experts.finish_exchange()
            self.expert_split.average_(self.of_experts.parameters)
        noise = None if self.noise is None else self._measure(self.noise)
        with self.context.meter.update_span(optimizer):
            grad_norm, skipped = self.precision.update(
                optimizer, self.parameters, self.job.clip_norm,
                reduce_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            )  # fmt: skip
        self.end_step(skipped=skipped)
        if self.of_experts is not None:
            self.of_experts.end_step(skipped=skipped)
        alike = self.same_samples
        counts = alike is None or not alike.rank  # ranks of a tensor group have the same loss
        return StepResult(loss if counts else None, grad_norm, skipped, noise=noise)

    def _measure(self, noise: GradientNoise) -> NoiseSample | None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        scale, copies = self.precision.loss_scale, self.copies_of_gradients
        return noise.finish(gradients, loss_scale=scale, copies=copies)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float | None:
        """Run the forward and backward passes of a step, and return this rank's loss; None if it computes none."""
        total: Tensor | None = None
        last = len(micro_batches) - 1
        for i, (inputs, targets) in enumerate(micro_batches):
            with nullcontext() if i == last else self.no_exchange():
                loss = self._forward_backward(inputs, targets, loss_function, i, len(micro_batches))
            total = loss if total is None else total + loss
        assert total is not None
        return float(total)

    def _forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, index: int, parts: int
    ) -> Tensor:
        meter = self.context.meter
        with meter.forward_span(), self.precision.autocast():
            loss = self.part_loss(loss_function, call(self.module, inputs), targets, index)
        self.memory.sample()  # all activations are in memory now
        # the mean over ranks of weighted gradients is the mean over all targets
        if self.loss_weights is None:
            loss = loss / parts
            weighted = loss if self.sample_weight == 1 else loss * self.sample_weight
        else:
            weighted = loss * self.loss_weights[index]
            loss = weighted / self.sample_weight
        if self.noise is not None:
            self.noise.begin_part(1.0 if self.loss_weights is None else self.loss_weights[index] * parts)
        with meter.backward_span():
            self.precision.scale(weighted).backward()
        self.memory.sample()  # all gradients are in memory now
        return loss.detach()

    def part_loss(self, loss_function: LossFunction, output: Any, targets: Any, index: int) -> Tensor:
        """Return the loss of one micro-batch, not yet weighted; zero if none of its targets counts."""
        if self.loss_weights is not None and self.loss_weights[index] == 0:
            return zero_of(output, index)
        return loss_function(output, targets)

    def averaged(self) -> StandIns:
        """Return the mean over all ranks of each parameter that the ranks train separately; called by all ranks.

        The mapping is empty if all ranks have the same parameter values.
        """
        return {} if self.compressor is None else self.compressor.averaged(self.carrier)

    def consensus(self) -> StandIns:
        """Return the tensors that replace this rank's own in evaluations and checkpoints; called by all ranks.

        Parameters that the ranks train separately are replaced by their mean over all ranks. Buffers, such as the
        running means of batch norm, are replaced by those of the rank `buffers_from`, as in DistributedDataParallel.
        """
        return {**self.averaged(), **self.shared_buffers(self.model)}

    def shared_buffers(self, module: nn.Module) -> StandIns:
        """Return the buffers of the rank `buffers_from` for those of a module, by this rank's; called by all ranks."""
        if self.context.group is None:
            return {}
        buffers = {buffer: _copied(buffer) for buffer in module.buffers()}
        for copy in buffers.values():
            if copy.layout == torch.strided:  # backends cannot send other layouts: each rank uses its own
                dist.broadcast(copy, group=self.context.group, group_src=self.buffers_from)
        return buffers

    def free_gathered(self) -> None:
        """Free what passes without a backward pass have gathered."""
        if self.of_experts is not None:
            self.of_experts.free_gathered()

    @contextmanager
    def evaluating(self) -> Iterator[Predict]:
        """Return a context manager within which the model has the tensors of `consensus` and is in evaluation mode.

        Gradients are disabled, and the model is restored on exit.

        Yields:
            A function from inputs to outputs; it returns None on a rank that computes no outputs, such as a pipeline
            stage other than the last.
        """
        model = self.plain_module
        with unchanged(model, self.consensus()), torch.no_grad(), self.precision.autocast():
            model.eval()
            yield partial(call, model)

    @property
    def plain_module(self) -> nn.Module:
        """The user's module, without `DistributedDataParallel` around it."""
        module = self.module
        return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

    def full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name as whole tensors on this rank; called by all ranks."""
        averaged = self.averaged()
        return self.joined({name: averaged.get(p, p) for name, p in self.plain_module.named_parameters()})

    def joined(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return whole tensors by parameter name, gathered over the groups of `splits`; called by all ranks."""
        for split in self.splits:
            tensors = split.wholes(tensors)
        return tensors

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """Return the tensors in this rank's memory by type of memory; called at any time during a measured step.

        A strategy with buffers of its own adds them here. `step` samples the memory after each forward and each
        backward pass. For tensors that are freed before the next sample, the strategy must call ``self.memory.hold``
        when it allocates them.
        """
        held = held_by_default(self.model, optimizer, self.roots)
        kept = [] if self.compressor is None else self.compressor.work_space
        if self.of_experts is not None:
            kept = [*kept, *self.of_experts.held(optimizer)["buffers"]]  # a tensor in both counts once
        return {**held, "buffers": [*held["buffers"], *kept]}

    def checkpoint_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the states of model and optimizer for a checkpoint: whole tensors or DTensors by name."""
        from shardscope.training.checkpoint.optimizer_state import state_to_save  # only for runs that save

        named = self.named_optimizer(optimizer)
        return {"model": self.model_state(), "optimizer": state_to_save(named, self.all_ranks, self._held_as)}

    def named_optimizer(self, optimizer: torch.optim.Optimizer) -> NamedOptimizer | None:
        """Return the optimizer that updates this rank's parameters, with their names; None if the rank has none."""
        return NamedOptimizer(optimizer, {p: name for name, p in self.updated_parameters})

    @property
    def holding(self) -> Holding:
        """How this rank holds the parameters that its optimizer updates."""
        return Holding(
            f"{self.layout} {digest_of([(name, p.is_meta) for name, p in self.model.named_parameters()])}"
        )

    @property
    def _held_as(self) -> Holding:
        """How this rank holds the parameters of the whole model."""
        holding = self.holding
        for split in self.splits:
            holding = TensorHolding.of(holding, split)
        return holding

    def model_state(self) -> dict[str, Any]:
        """Return the `state_dict` with the tensors of `consensus`, the same on all ranks; called by all ranks."""
        return self._state_of(self.model.state_dict(keep_vars=True))

    def _state_of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries of a `state_dict` with the tensors of `consensus`; called by all ranks."""
        shared = self.consensus()
        held = {name: shared.get(v, v).detach() if isinstance(v, Tensor) else v for name, v in own.items()}
        for split in self.splits:
            held = {name: split.piece(name, v) if isinstance(v, Tensor) else v for name, v in held.items()}
        return held

    def state_to_fill(
        self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint, *, with_state: bool, within: str = ""
    ) -> dict[str, Any]:
        """Return the part of `saved` that this rank loads, as empty tensors and values; called by all ranks.

        Args:
            optimizer: The strategy's optimizer.
            saved: The checkpoint.
            with_state: Whether to load the optimizer state.
            within: Prefix of the keys in the checkpoint.
        """
        from shardscope.training.checkpoint.optimizer_state import state_to_fill

        named = self.named_optimizer(optimizer) if with_state else None
        at = f"{within}optimizer."
        state = state_to_fill(named, saved, self._held_as, within=at, rank=self.all_ranks.rank)
        return {"model": self.model_state(), "optimizer": state}

    # Methods for the compressor's state, which checkpoints save separately.

    @property
    def layout(self) -> str:
        """Name of the layout, which is the division of gradients among ranks and buckets.

        Compressor state that was saved with a different layout must be converted.
        """
        return f"{self.name} {self.context.world_size}{self._tensor_part}"

    @property
    def _tensor_part(self) -> str:
        """The part of `layout` that names the tensor ranks; empty if there are none."""
        return "" if self.tensor_split is None else f"{DIVIDED_SUFFIX}tensor {self.tensor_split.axis.size}"

    def compressor_state(self) -> dict[str, Tensor]:
        """Return the compressor state to save in this rank's checkpoint, by name."""
        assert self.compressor is not None
        return self.compressor.state_dict()

    def load_compressor_state(self, state: dict[str, Tensor]) -> None:
        """Load the state that `compressor_state` returned."""
        assert self.compressor is not None
        self.compressor.load_state_dict(state)

    def reshard_compressor_state(self, state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
        """Convert compressor state from `layout` to this strategy's layout: by default, to tensors by parameter."""
        old = shards_of(layout)
        if old is None:
            return state
        return by_parameter(state, units_with_parameters(self.model, besides=root_blocks(layout)), old)

    @property
    def gradient_order(self) -> list[str]:
        """Names of the trained parameters in the order in which gradients arrive; empty if the order has no effect."""
        return []

    def follow_order(self, names: list[str]) -> None:
        """Restore the `gradient_order` of the interrupted run; called before the first step of a resumed run."""

    def warm_up_buckets(self, loss_function: LossFunction) -> None:
        """Make the gradient buckets final; otherwise they change after the first step. Called after `setup`.

        This must not change the model.
        """

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load model and optimizer from `state`: the structure of `checkpoint_state`, with values from a checkpoint."""
        saved = {
            name: value.part if isinstance(value, TensorPart) else value
            for name, value in state["model"].items()
        }
        own = self.model.state_dict(keep_vars=True)
        self.model.load_state_dict({**own, **saved})  # ranks may have parts of the model that others save
        self.load_optimizer_state(state["optimizer"], optimizer)

    def load_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load the optimizer's part of a checkpoint."""
        from shardscope.training.checkpoint.optimizer_state import load_state

        named = self.named_optimizer(optimizer)
        if named is not None and state:
            load_state(named, state, self._held_as, rank=self.all_ranks.rank)


def no_gradient_error(parameter: str, strategy: str, *, where: str = "") -> SpecError:
    """Return the error for a trained parameter that the loss does not use, with a strategy that needs all gradients."""
    return SpecError(
        f"parameter {parameter!r} has no gradient from the loss{where}, but strategy={strategy!r} needs a gradient for "
        "every trained parameter; use it in the loss, or freeze it with requires_grad_(False)"
    )


def _copied(buffer: Tensor) -> Tensor:
    """Return a copy that a backend can send: a strided tensor is made contiguous."""
    is_strided = buffer.layout == torch.strided
    return buffer.clone(memory_format=torch.contiguous_format) if is_strided else buffer.clone()
