"""Pipeline stages for torch's schedules that record every operation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from shardscope.analytic.schedules import DURATIONS, ScheduledOp, build
from shardscope.analytic.schedules.stage_passes import followed_by_weights, pass_flops
from shardscope.methods.strategies.pipeline import not_split
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.training import clock
from shardscope.training._compat_pipelining import OrderedSchedule, StaticStage, without_gathers
from shardscope.training.memory import MemoryWatch
from shardscope.training.meter import Meter
from shardscope.training.split_trace import SPLIT_ERRORS, reason_of
from shardscope.training.strategies.base import RankStrategy


def schedule_of(
    schedule: PipelineSchedule, stages: Sequence[RecordedStage], microbatches: int, **options: Any
) -> Any:
    """Return an object that runs a schedule on this rank's stages.

    If torch has a class for the schedule, the object is an instance of that class. Otherwise, torch's runtime executes
    the order of the `PipelineSchedule`.

    Args:
        schedule: The schedule.
        stages: The stages of this rank, in order.
        microbatches: Number of micro-batches in one pass.
        options: Keyword arguments for torch's schedule.
    """
    table = build(schedule, stages[0].group_size, microbatches, len(stages))
    followed = followed_by_weights(table.ranks[stages[0].group_rank])
    for stage in stages:
        stage.followed, stage.schedule = followed, schedule
    if schedule.torch_class is None:
        return without_gathers(OrderedSchedule(table.ranks, stages, microbatches, **options))
    run_by = getattr(schedules, schedule.torch_class)
    takes_one = issubclass(run_by, schedules.PipelineScheduleSingle)
    return without_gathers(run_by(stages[0] if takes_one else list(stages), microbatches, **options))


class StageRecorder:
    """Recorder of one rank's operations in a step: kind, stage, micro-batch, start and end (Unix time in seconds)."""

    def __init__(self, meter: Meter, memory: MemoryWatch, backward_passes: int) -> None:
        self.meter = meter
        self.memory = memory
        self.recomputed = backward_passes - DURATIONS["B"]
        self.ops: list[list[Any]] = []
        self.is_last_pass = True
        """Whether the current pass through the pipeline is the last one of a step."""
        self.first = 0
        """Offset added to micro-batch numbers, so that they are consecutive over all passes of a step."""

    def begin(self) -> None:
        """Clear the operations of the last step."""
        self.ops, self.first = [], 0
        if self.meter.pace is not None:
            self.meter.pace.begin_queue()

    @contextmanager
    def op(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Context that records its body as one operation."""
        name = "forward" if kind == "F" else "backward"
        with self.meter.stage_span(name, stage, pass_flops(kind, stage, self.recomputed)) as times:
            yield
        self.ops.append([kind, stage, microbatch + self.first, round(times.start, 6), round(times.end, 6)])
        self.memory.sample()

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Context for computing the loss, which extends the last recorded forward pass by the time of its body."""
        with self.meter.span("compute", "forward"):
            yield
        self.ops[-1][4] = round(clock.now(), 6)


class RecordedStage(StaticStage):
    """torch's stage, which also records forward and backward passes."""

    recorder: StageRecorder
    data: RankStrategy
    """Strategy of the ranks with the same stage, which exchanges the stage's gradients."""
    inputs: Sequence[Any] = ()
    """Inputs of each micro-batch, for the first stage; set here because torch splits and checks only tensors."""
    schedule: PipelineSchedule
    """The schedule; an error of its first split backward pass says that PyTorch cannot split it."""
    has_split = False
    """Whether a backward pass for weights has succeeded."""
    followed: Collection[ScheduledOp] = ()
    """Backward passes after which parameters stay gathered; see `followed_by_weights`."""

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *others: Any, **options: Any) -> Any:
        with self.recorder.op("F", self.stage_index, fwd_chunk_id):
            taken = (self.inputs[fwd_chunk_id],) if self.is_first else args
            return super().forward_one_chunk(fwd_chunk_id, taken, *others, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        refused = nullcontext() if full_backward else self._refusing()
        with self._running("B" if full_backward else "I", bwd_chunk_id), refused:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._running("W", bwd_chunk_id), self._refusing():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.has_split = True

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Return a context manager for halves of backward passes, which refuses stages that cannot be split."""
        try:
            yield
        except SPLIT_ERRORS as error:
            if self.has_split or isinstance(
                error.__cause__ or error, dist.DistError | torch.OutOfMemoryError
            ):
                raise
            what = f"stage {self.stage_index + 1} of {self.num_stages}"
            raise not_split(self.schedule, what, reason_of(error)) from error

    def _running(self, kind: str, microbatch: int) -> AbstractContextManager[None]:
        """Return a context manager for a backward pass, which records it."""
        self.is_followed = (kind, self.stage_index, microbatch) in self.followed
        return self.recorder.op(kind, self.stage_index, microbatch)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        self.data.before_backward(self.submod, is_split=backward_type != "full")
        found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.recorder.memory.note()  # parameters that the pass has gathered
        is_last = last_backward and self.recorder.is_last_pass
        self.data.after_backward(
            self.submod,
            has_weights=backward_type != "input",
            is_last=is_last,
            is_followed=self.is_followed,
        )
        return found

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: `data` takes the gradients of each micro-batch."""
