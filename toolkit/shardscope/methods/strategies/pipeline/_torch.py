"""Pipeline strategy: a model split into stages, run by torch's own schedules.

    setup     split the model, free the layers of other ranks, create torch's stages and schedule
    step      one or more passes of micro-batches through the pipeline; sum tied gradients; clip and update
    evaluate  pass activations from stage to stage

Each rank updates its own parameters. The global norm takes one all-reduce of a single number. Trust ratios need no
communication, because tensors are never sharded. If a parameter is tied between two stages (such as GPT's token
embedding and head), both ranks hold a copy. The gradients of the copies are summed, so that the copies stay equal, and
only one copy is counted in the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.methods.strategies import pipeline
from shardscope.methods.strategies.pipeline._torch_cut import StageModule, cut, free_unused
from shardscope.methods.strategies.single._torch import SingleRank
from shardscope.spec import Job
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.context import RankContext
from shardscope.training.memory import Held
from shardscope.training.models.in_order import InOrder
from shardscope.training.observe import StandIns, unchanged
from shardscope.training.optim import LayerSignal, TrainedParameters, built_by
from shardscope.training.optim.holding import Holding
from shardscope.training.sequence import length_of
from shardscope.training.sharding import largest_over_ranks, local
from shardscope.training.strategies.base import (
    DIVIDED_SUFFIX,
    LossFunction,
    MicroBatch,
    Predict,
    RankStrategy,
)
from shardscope.training.tensor import TensorAxis
from shardscope.training.tensor.same_batch import require_same_batch
from shardscope.training.tensors_in import tensors_in

_PLACEHOLDER = "_no_parameters_on_this_rank"


class _StageAxis(TensorAxis):
    """The ranks along a pipeline."""

    name: ClassVar[str] = "pipeline"


class PipelineRank(RankStrategy):
    """Pipeline strategy: micro-batches pass through stages of layers, forward and backward.

    Args:
        job: The job.
        context: Context of the ranks along the pipeline.
        along: The job of the ranks along the pipeline; None if they are all ranks of the job.
        data: Strategy of the ranks with the same stages, each of a replica of its own; None for one replica.
    """

    settings: pipeline.Pipeline
    lockstep = True
    trained_as = InOrder

    def __init__(
        self,
        job: Job,
        context: RankContext,
        *,
        along: Job | None = None,
        data: RankStrategy | None = None,
    ) -> None:
        super().__init__(job, context)
        self.along = along or job
        assert isinstance(self.along.strategy, pipeline.Pipeline)
        self.settings = self.along.strategy
        self.data = data or SingleRank(job, context.on_axis("data", None))
        self.compressor = self.data.compressor

    @property
    def of_data(self) -> RankStrategy:
        return self.data if self.data.context.world_size > 1 else self

    @property
    def data_rank(self) -> int:
        return self.data.context.rank // self.ranks_per_sample  # the ranks of a pipeline see the same batch

    @property
    def random_index(self) -> int:
        return self.context.rank * self.data.context.world_size + self.data.context.rank

    def divide_model(self, model: nn.Module) -> None:
        super().divide_model(model)
        split = self.tensor_split
        if split is not None and split.cuts_sequences and split.axis.draws:
            raise SpecError(
                "sequence_parallel=True in a pipeline is not available for a model that draws random numbers, such as "
                "for dropout, because a stage that begins with parts of sequences draws those of whole ones; use "
                "sequence_parallel=False, or set its dropout to 0"
            )

    def require_same_batch(self, micro_batches: Sequence[MicroBatch]) -> None:
        super().require_same_batch(micro_batches)
        axis = _StageAxis(self.context.world_size, self.context.rank, self.context.group)
        # the first stage takes its own inputs, the last its own targets
        require_same_batch(axis, [((), targets) for _, targets in micro_batches])

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Return a context manager for passes through layers: in the job's precision, and by parts of sequences."""
        split = self.sequence_split
        parts = nullcontext() if split is None else split.passing(self.model, self.num_tokens)
        with self.precision.autocast(), parts:
            yield

    def setup(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.module = self.wrap(model)
        return self.module

    def wrap(self, model: nn.Module) -> nn.Module:
        settings, context = self.settings, self.context
        assert context.group is not None
        self.group = context.group
        inputs = self.example()[0]
        self.num_tokens = length_of((inputs, ()))
        self.cut = cut(model, inputs, self.passing, self.along, context)
        if self.all_ranks.rank == 0:  # the count limits the number of ranks of a resumed run
            split = list(self.cut.split)
            context.events.emit("pipeline_layers", count=sum(split), split=split)
        self.stage_ranks = settings.stage_ranks(context.world_size)
        self.order = [name for name, _ in model.named_parameters()]
        self._start_alike(model)
        modules = {index: StageModule(self.cut.stages[index], self.passing) for index in self._own_stages()}
        self.modules = nn.ModuleList(modules.values())
        free_unused(model, [layer for index in modules for _, layer in self.cut.stages[index]])
        self.set_experts_apart()
        own = [(name, parameter) for name, parameter in self.own_parameters(model) if not parameter.is_meta]
        self.data.adopt(model, [*self.modules], own, repeated=self.cut.repeated)
        self.names = dict(_held(model))
        self.parameters = [p for _, p in self.data.updated_parameters if p.requires_grad]
        self.placeholder = None if self.parameters else self._placeholder(model)
        if self.placeholder is not None:
            self.parameters = [self.placeholder]
        self.reduce_squares, self.reduce_grad_square = self.data.reduce_squares, self._sum
        self.precision.share_overflow = self._share_overflow
        self._make_tied_rings()
        self._make_stages(modules)
        return self.modules

    def _start_alike(self, model: nn.Module) -> None:
        """Broadcast each tied parameter from the first rank that has a copy."""
        for name, parameter in model.named_parameters():
            holders = self.cut.holders.get(name, [])
            if len(holders) > 1:
                dist.broadcast(parameter.detach(), group_src=holders[0], group=self.group)

    def _own_stages(self) -> list[int]:
        return [stage for stage, rank in enumerate(self.stage_ranks) if rank == self.context.rank]

    def _placeholder(self, model: nn.Module) -> nn.Parameter:
        """Return a one-element parameter for a rank without parameters, so that it too can have an optimizer."""
        placeholder = nn.Parameter(
            torch.zeros(1, dtype=self.precision.weight_dtype, device=self.context.device)
        )
        model.register_parameter(_PLACEHOLDER, placeholder)
        return placeholder

    @property
    def updated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own = [(name, p) for name, p in self.data.updated_parameters if name != _PLACEHOLDER]
        return own if self.placeholder is None else [*own, (_PLACEHOLDER, self.placeholder)]

    def _make_tied_rings(self) -> None:
        """Create a ring for each tied parameter over the ranks that hold a copy; the lowest rank counts it in norms."""
        tied = {
            name: ranks for name, ranks in self.cut.holders.items() if len(ranks) > 1 and name in self.names
        }
        self.rings = {
            name: RingAllReduce(self.group, members=ranks)
            for name, ranks in tied.items()
            if self.names[name].requires_grad
        }
        updated = dict(self.updated_parameters)
        repeated = [updated[name] for name in self.rings if tied[name][0] != self.context.rank]
        self.duplicate_grad_params = [*self.data.duplicate_grad_params, *repeated]

    def _sum(self, squares: Tensor) -> Tensor:
        total = squares.to(self.context.device, copy=True)
        if self.data.reduce_grad_square is not None:
            total = self.data.reduce_grad_square(total)
        dist.all_reduce(total, group=self.group)
        return total.to(squares.device)

    def _share_overflow(self, flag: Tensor) -> None:
        """Make all ranks skip a step if a gradient overflows on any rank (fp16)."""
        if self.data.precision.share_overflow is not None:
            self.data.precision.share_overflow(flag)
        largest_over_ranks(flag, self.group)

    def _make_stages(self, modules: Mapping[int, StageModule]) -> None:
        from shardscope.methods.strategies.pipeline._torch_stage import (
            RecordedStage,
            StageRecorder,
            schedule_of,
        )

        self.recorder = StageRecorder(self.context.meter, self.memory, self.job.backward_passes)
        self.stages: dict[int, Any] = {}
        boundaries = [tensors_in(self.example()[0]), *self.cut.outputs]
        for index, module in modules.items():
            self.stages[index] = RecordedStage(
                module, index, len(self.stage_ranks), self.context.device, group=self.group,
                is_staged=self.context.is_staged,
                splits_backward=self.settings.schedule.splits_backward,
                input_args=_boundary(boundaries[index]), output_args=_boundary(boundaries[index + 1]),
            )  # fmt: skip
            self.stages[index].recorder, self.stages[index].data = self.recorder, self.data
        total = self.job.num_micro_batches
        self.in_a_pass = self.settings.microbatches or total
        self.schedule = schedule_of(
            self.settings.schedule,
            list(self.stages.values()),
            self.in_a_pass,
            loss_fn=self._loss,
            scale_grads=False,
        )

    @property
    def _has_first(self) -> bool:
        return 0 in self.stages

    @property
    def _has_last(self) -> bool:
        return len(self.stage_ranks) - 1 in self.stages

    @property
    def layout(self) -> str:
        stages = "-".join(f"{n}@{rank}" for n, rank in zip(self.cut.split, self.stage_ranks, strict=True))
        return f"{self.data.layout}{self._tensor_part}{DIVIDED_SUFFIX}stages {stages}"

    @property
    def part_number(self) -> int:
        return self.context.rank * self.data.context.world_size + self.data.part_number

    def build_optimizer(self) -> torch.optim.Optimizer:
        parameters = TrainedParameters(
            self.updated_parameters, reduce_squares=self.reduce_squares,
            reduce_grad_square=self.reduce_grad_square, duplicate_grad_params=self.duplicate_grad_params,
            dimensions=self.data.dimensions,
        )  # fmt: skip
        return built_by(self.job.optimizer, parameters)

    @property
    def reports_layer_signals(self) -> bool:
        """Whether this rank reports layer signals: one of the ranks that have the same layers does."""
        return not self.data.context.rank and (self.tensor_split is None or not self.tensor_split.axis.rank)

    def layer_signals(self, optimizer: torch.optim.Optimizer) -> list[LayerSignal]:
        return [signal for signal in super().layer_signals(optimizer) if signal.layer != _PLACEHOLDER]

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        return self.data.held(optimizer)

    def close(self) -> None:
        self.data.close()

    # One step.

    def begin_step(self, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> None:
        self.data.begin_step(optimizer, num_micro_batches)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction) -> float | None:
        self.recorder.begin()
        self.losses: list[Tensor] = []
        self.loss_function, self.parts = loss_function, len(micro_batches)
        self.precision.scale(
            torch.zeros(1, device=self.context.device)
        )  # a GradScaler must scale a tensor before its step
        for first in range(0, self.parts, self.in_a_pass):
            self.recorder.first, self.recorder.is_last_pass = first, first + self.in_a_pass >= self.parts
            self._pass(micro_batches[first : first + self.in_a_pass])
        return self._mean_loss()

    def finish_exchange(self) -> None:
        # Shards of gradients are those of the same replica's copies; means of compressed gradients may differ by stage.
        if self.data.settings.exchanges_in_passes or self.compressor is not None:
            self.data.finish_exchange()
            self._sum_tied()
        else:
            self._sum_tied()
            self.data.finish_exchange()
        self._report()

    def end_step(self, *, skipped: bool) -> None:
        self.data.end_step(skipped=skipped)

    def _mean_loss(self) -> float | None:
        if not self.losses:
            return None
        losses = torch.stack(self.losses)
        return float(losses.mean() if self.loss_weights is None else losses.sum())

    def _pass(self, part: Sequence[MicroBatch]) -> None:
        """Run the micro-batches of `part` forward and backward through the pipeline."""
        self.num_tokens = length_of(part[0])
        self.targets = [targets for _, targets in part]
        if self._has_first:
            self.stages[0].inputs = [inputs for inputs, _ in part]
        try:
            self.schedule.step(
                target=torch.arange(len(part)) if self._has_last else None, return_outputs=False
            )
        except RuntimeError as error:
            if error.__cause__ is not None:  # torch wraps a layer's exception
                raise error.__cause__ from None
            raise

    def _loss(self, output: Any, index: Tensor) -> Tensor:
        """Return the loss for the backward pass: the contribution of micro-batch `index` to the mean over the batch."""
        weights, part = self.loss_weights, self.recorder.first + int(index)
        with self.recorder.loss(), self.precision.autocast():
            loss = self.part_loss(self.loss_function, output, self.targets[int(index)], part)
        self.losses.append(loss.detach() if weights is None else loss.detach() * weights[part])
        return self.precision.scale(loss / self.parts if weights is None else loss * weights[part])

    def _sum_tied(self) -> None:
        if self.placeholder is not None:
            self.placeholder.grad = torch.zeros_like(self.placeholder)
        for name, ring in self.rings.items():
            parameter = self.names[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local(parameter.grad)
            is_staged = self.context.is_staged(grad.nbytes)
            summed = ring.all_reduce_(grad.cpu().contiguous() if is_staged else grad.contiguous())
            if summed.data_ptr() != grad.data_ptr():
                grad.copy_(summed)

    def _report(self) -> None:
        step = self.context.meter.step
        if self.job.record.shows(step):
            self.context.events.emit("schedule", step=step, ops=self.recorder.ops)

    # Evaluation.

    @contextmanager
    def evaluating(self) -> Iterator[Predict]:
        with unchanged(self.modules, self.consensus()), torch.no_grad(), self.precision.autocast():
            self.modules.eval()
            yield self._predict
        self.data.free_gathered()

    def consensus(self) -> StandIns:
        return self.data.shared_buffers(self.modules)  # each rank already holds the tensors that it trains

    def _predict(self, inputs: Any) -> Any:
        """Run the forward pass; return the outputs on the rank of the last stage, and None on all other ranks."""
        x = inputs
        self.num_tokens = length_of((inputs, ()))
        rank, last = self.context.rank, len(self.stage_ranks) - 1
        for index, stage in self.stages.items():
            before = self.stage_ranks[index - 1] if index else rank
            if before != rank:
                x = receive_activations(before, self.context)
            assert x is not None
            x = stage.submod(x)
            after = self.stage_ranks[index + 1] if index < last else rank
            if after != rank:
                send_activations(x, after, self.context)
                x = None
        return x

    # The whole model, on every rank and in checkpoints.

    def full_parameters(self) -> dict[str, Tensor]:
        whole, held = {}, self.data.full_parameters()
        shapes = dict(self.model.named_parameters())
        for name in self.order:
            holders = self.cut.holders.get(name)
            if holders is None:  # no layer uses it
                continue
            tensor = (
                held[name].detach().clone()
                if name in self.names
                else torch.empty_like(shapes[name], device=self.context.device)
            )
            dist.broadcast(tensor, group_src=holders[0], group=self.group)
            whole[name] = tensor
        return self.joined(whole)

    @property
    def holding(self) -> Holding:
        of_data = self.data.holding
        return of_data if of_data.is_split else super().holding

    def model_state(self) -> dict[str, Any]:
        return self._state_of(
            {key: v for key, v in self.model.state_dict(keep_vars=True).items() if _saved(key, v)}
        )

    def checkpoint_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super().checkpoint_state(optimizer)
        return {
            part: {key: v for key, v in values.items() if _saved(key, v)} for part, values in state.items()
        }


def _held(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that this rank holds, by name."""
    return [(name, p) for name, p in model.named_parameters() if p.device.type != "meta"]


def _boundary(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return meta tensors with the shapes and dtypes of messages; floating-point tensors always require grad.

    A preceding stage that needs no gradient (frozen or without parameters) discards it. If messages did not require
    grad, torch's split backward pass would skip the weights of the next stage.
    """
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(
            tensor.is_floating_point()
        )
        for tensor in tensors
    )


def _saved(key: str, value: Any) -> bool:
    """Return whether this rank saves an entry in checkpoints; False for placeholders and other ranks' entries."""
    return _PLACEHOLDER not in key and not (isinstance(value, Tensor) and value.device.type == "meta")


# During training, all ranks know the shapes of messages in advance. During an evaluation, the last micro-batch may be
# smaller, so each message is preceded by a header with the message's shape and dtype.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
_TAG = 1 << 19  # different from the tags used in training


def send_activations(x: Tensor, peer: int, context: RankContext) -> None:
    """Send a floating-point tensor to a rank that calls `receive_activations`."""
    assert context.group is not None
    shape = [*x.shape, *[0] * (_MOST_DIMS - x.dim())]
    header = torch.tensor([_DTYPES.index(x.dtype), x.dim(), *shape])
    context.group.send([header], peer, _TAG).wait()
    context.group.send([x.detach().cpu().contiguous()], peer, _TAG + 1).wait()


def receive_activations(peer: int, context: RankContext) -> Tensor:
    """Receive a tensor that rank `peer` sends with `send_activations`."""
    assert context.group is not None
    header = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
    context.group.recv([header], peer, _TAG).wait()
    kind, dims, *shape = header.tolist()
    x = torch.empty(shape[:dims], dtype=_DTYPES[kind])
    context.group.recv([x], peer, _TAG + 1).wait()
    return x.to(context.device)
