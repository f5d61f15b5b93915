"""The expert axis: ranks that each hold some of a layer's experts, and exchange tokens by all-to-all.

Each rank routes its own tokens. In a layer, ranks first exchange how many tokens they send for each expert. Then one
all-to-all with uneven parts dispatches the tokens, each rank computes with its own experts, and another one returns the
outputs to be combined (GShard, arXiv 2006.16668, section 3.3). The backward pass sends gradients the opposite way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.compute_pace import ComputePace
from shardscope.training.places import places_of
from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import with_adjoint

Compute = Callable[[Tensor, list[int]], Tensor]
"""Function from tokens that are sorted by expert, and the number for each expert, to the experts' outputs."""


@dataclass(frozen=True, eq=False)
class ExpertAxis(TensorAxis):
    """The ranks over which the experts are distributed: rank r of n has experts ``r E / n`` to ``(r + 1) E / n``.

    Without a group, for tracing one rank's part of a model, nothing is sent, and every rank has the same even load.
    """

    name: ClassVar[str] = "expert"

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def dispatch_and_combine(
        self, tokens: Tensor, counts: list[int], compute: Compute, token_flops: float
    ) -> Tensor:
        """Return the outputs of the experts of all ranks for this rank's tokens, in the same order.

        Args:
            tokens: Tokens `(R, hidden)` of this rank, sorted by expert.
            counts: Number of tokens for each of the E experts.
            compute: Function of this rank's own experts.
            token_flops: FLOPs of `compute` for one token.
        """
        taken = self._exchange_counts(counts, tokens.device)
        own = len(counts) // self.size
        sent = [sum(counts[at : at + own]) for at in range(0, len(counts), own)]
        received = [sum(row) for row in taken]
        dispatch = partial(self._dispatch, sent=sent, received=received)
        combine = partial(self._combine, sent=received, received=sent, flops=sum(received) * token_flops)
        arrived = with_adjoint(tokens, dispatch, partial(combine, is_forward=False))
        by_expert = _places_by_expert(taken, tokens.device)
        outputs = compute(arrived[by_expert], [sum(each) for each in zip(*taken, strict=True)])
        back = torch.empty_like(by_expert)
        back[by_expert] = places_of(len(by_expert), tokens.device)
        return with_adjoint(outputs[back], partial(combine, is_forward=True), dispatch)

    def _dispatch(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        """Send the input of the ranks' experts: tokens, or in a backward pass gradients of outputs."""
        found = self._rows(rows, sent=sent, received=received)
        if self._pace is not None:
            self._pace.begin_part()
        return found

    def _combine(
        self, rows: Tensor, *, sent: list[int], received: list[int], flops: float, is_forward: bool
    ) -> Tensor:
        """Send back what this rank's experts have computed: outputs, or in a backward pass gradients of tokens."""
        if self._pace is not None:
            self._pace.end_part(flops, is_forward=is_forward)
        return self._rows(rows, sent=sent, received=received)

    @property
    def _pace(self) -> ComputePace | None:
        """The rank's emulated processor, if there is one."""
        return None if self.group is None else self.group.meter.pace

    def _exchange_counts(self, counts: list[int], device: torch.device) -> list[list[int]]:
        """Return how many tokens this rank receives from each rank, for each of its own experts."""
        own = len(counts) // self.size
        outgoing = torch.tensor(counts, dtype=torch.int64, device=device)
        taken = torch.empty_like(outgoing)
        if not self.exchange(taken, outgoing, None, None):
            return [counts[:own]] * self.size
        rows: list[list[int]] = taken.view(self.size, own).tolist()
        return rows

    def _rows(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        """Send rows `(R, hidden)` to the ranks, `sent` to each, and return those that arrive, `received` from each."""
        output = rows.new_empty(sum(received), rows.shape[-1])
        self.exchange(output, rows.contiguous(), received, sent)
        return output

    def exchange(
        self, output: Tensor, tensor: Tensor, received: list[int] | None, sent: list[int] | None
    ) -> bool:
        """Send rows of a tensor to the ranks, `sent` to each, and write the rows that arrive, `received` from each.

        None stands for equal parts of a tensor whose size does not depend on the batch.

        Returns:
            Whether anything was sent.
        """
        return self._call(
            "all_to_all",
            tensor,
            lambda group: dist.all_to_all_single(output, tensor, received, sent, group=group),
            is_fixed=received is None,
        )


def _places_by_expert(taken: list[list[int]], device: torch.device) -> Tensor:
    """Return the places of rows that arrive rank by rank, in the order of the experts."""
    counts = [count for row in taken for count in row]
    places = places_of(sum(counts), device).split(counts)
    width = len(taken[0])
    return torch.cat([each for expert in range(width) for each in places[expert::width]])
