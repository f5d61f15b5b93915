"""Wrappers around parts of `torch.distributed.pipelining` that are private or differ between releases.

Import this module only in runs with a pipeline, because the import takes 20 ms.
"""

# ruff: noqa: SLF001 - this module wraps private names of PyTorch

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.utils.checkpoint import GraphExecGroup

from shardscope.training.recompute import recomputes_blocks

__all__ = [
    "OrderedSchedule",
    "StaticStage",
    "one_pass_for_weights",
    "stage_backward_input",
    "stage_backward_weight",
    "without_gathers",
]

logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
"""Turns off a log message with the whole schedule that PyTorch writes on any error; the error itself is still raised.
"""


@contextmanager
def one_pass_for_weights(module: nn.Module, groups: Sequence[Any]) -> Iterator[list[Any]]:
    """Return a context manager for a `stage_backward_weight`, which yields the groups of weights to give it.

    PyTorch computes the gradients of each group in a backward pass of its own, and would recompute a checkpointed layer
    in each of them. Within this context, it recomputes a layer once.

    Args:
        module: The stage's module. If it recomputes blocks, the last comes first, so that each is freed before an
            earlier one is recomputed.
        groups: The groups of `stage_backward_input`.
    """
    with GraphExecGroup():
        yield [*(reversed(groups) if recomputes_blocks(module) else groups)]


class StaticStage(PipelineStage):
    """Pipeline stage that sends no messages except activations and gradients, copied through the CPU if necessary.

    Shardscope's communication formulas assume that there are no other messages. By default, PyTorch's stages also
    exchange messages to agree on whether input shapes are known, and to warm up connections. Here the shapes are always
    given (as `input_args` and `output_args`), and gloo needs no warm-up.

    Args:
        args: Passed to `PipelineStage`.
        is_staged: Function from the size of a message in bytes to whether it is copied to the CPU before it is sent,
            and back to the device after it is received.
        splits_backward: Whether to clone outputs that are views. PyTorch's split backward pass detaches a stage's
            output in place, which fails for a view (such as the output of a linear layer on a 3-d input).
        options: Passed to `PipelineStage`.
    """

    def __init__(
        self,
        *args: Any,
        is_staged: Callable[[int], bool] = lambda _: False,
        splits_backward: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._is_staged = is_staged
        self.splits_backward = splits_backward
        self._landing: dict[int, tuple[Tensor, Tensor]] = {}

    # Methods that suppress the other messages.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        is_sent = self.splits_backward and isinstance(output, Tensor)
        return output.clone() if is_sent and output._is_view() else output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run PyTorch's method, but do not cache an output of the last stage unless it is a tensor."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if self.is_last and not isinstance(output, Tensor):
            self.fwd_cache[fwd_chunk_id] = (), self.fwd_cache[fwd_chunk_id][1]
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with one_pass_for_weights(self.submod, bwd_kwargs["param_groups"]) as groups:
            given = {**bwd_kwargs, "param_groups": groups}
            return super().backward_maybe_with_nosync(backward_type, given, last_backward)

    # Methods that make messages contiguous, and copy them through the CPU if `is_staged`.

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sendable(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sendable(super().get_bwd_send_ops(bwd_chunk_id))

    def _sendable(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            op.tensor = (op.tensor.cpu() if self._is_staged(op.tensor.nbytes) else op.tensor).contiguous()
        return ops

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        ops = super()._get_recv_ops(recv_infos)
        for op in ops:
            if self._is_staged(op.tensor.nbytes):
                landing = torch.empty_like(op.tensor, device="cpu", requires_grad=False)
                self._landing[id(op.tensor)] = op.tensor, landing
                op.tensor = landing
        return ops

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._copy_to_device(self.args_recv_info[fwd_chunk_id])
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._copy_to_device(self.grad_recv_info[bwd_chunk_id])
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _copy_to_device(self, recv_infos: Any) -> None:
        for info in recv_infos:
            if info.buffer is not None and id(info.buffer) in self._landing:
                buffer, landing = self._landing.pop(id(info.buffer))
                with torch.no_grad():
                    buffer.copy_(landing)


_KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


class OrderedSchedule(_PipelineScheduleRuntime):
    """Pipeline schedule that runs forward and backward passes in a given order; PyTorch adds the sends and receives.

    Args:
        ranks: For every rank, its passes in execution order. Each is a tuple of the type of pass, the stage and the
            micro-batch. The types are ``"F"`` (forward), ``"B"`` (full backward), ``"I"`` (backward for the inputs)
            and ``"W"`` (backward for the weights).
        stages: The stages of this rank.
        microbatches: Number of micro-batches per step.
        options: Passed to PyTorch's schedule class.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[tuple[str, int, int]]],
        stages: Sequence[PipelineStage],
        microbatches: int,
        **options: Any,
    ) -> None:
        super().__init__(list(stages), microbatches, **options)  # type: ignore[no-untyped-call]
        self.pipeline_order = {
            rank: [_Action(stage, _KINDS[kind], batch) for kind, stage, batch in row]
            for rank, row in enumerate(ranks)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        self._losses: dict[int, Tensor] = {}

    # PyTorch stores losses in a list in the order of the forward passes, but reads them by micro-batch. A dict by
    # micro-batch is right for any order.

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *more: Any, **options: Any
    ) -> None:
        if stage.is_last and self._loss_fn is not None:
            compute: Any = self._compute_loss
            self._losses[mb_index] = compute(output, target_mbs[mb_index], *more, **options)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses[mb_index] if stage.is_last and self._loss_fn is not None else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        self._internal_losses = [loss for _, loss in sorted(self._losses.items())]
        self._losses.clear()
        super()._update_losses(stages, losses)  # type: ignore[no-untyped-call]


def without_gathers(schedule: Any) -> Any:
    """Remove from a schedule, in place, the gathers of FSDP2's parameters that PyTorch adds, and return it.

    FSDP2 gathers a stage's parameters itself, once in each pass, whatever passes the schedule runs in between.
    """
    if isinstance(schedule, _PipelineScheduleRuntime):
        added = {_ComputationType.UNSHARD, _ComputationType.RESHARD}
        for rank, actions in schedule.pipeline_order_with_comms.items():
            schedule.pipeline_order_with_comms[rank] = [
                action for action in actions if action.computation_type not in added
            ]
        schedule.unsharded_stages = {stage.stage_index for stage in schedule._stages}
    return schedule
