"""The expert axis: ranks that each hold some of a layer's experts, and send tokens to each other's.

Each rank routes its own tokens. In a layer, ranks tell each other how many tokens they send for each expert, exchange
the tokens by an all-to-all with uneven parts, compute with their own experts, and send the outputs back the same way
(GShard, arXiv 2006.16668, section 3.3). The backward pass sends the gradients the opposite way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from shardscope.training.tensor.axis import TensorAxis

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

    def mixed(self, tokens: Tensor, counts: list[int], compute: Compute) -> Tensor:
        """Return the outputs of the experts of all ranks for this rank's tokens, in the same order.

        Args:
            tokens: Tokens `(R, hidden)` of this rank, sorted by expert.
            counts: Number of tokens for each of the E experts.
            compute: Function of this rank's own experts.
        """
        taken = self._told(counts, tokens.device)
        own = len(counts) // self.size
        sent = [sum(counts[at : at + own]) for at in range(0, len(counts), own)]
        received = [sum(row) for row in taken]
        arrived: Tensor = _AllToAll.apply(tokens, received, sent, self)  # type: ignore[no-untyped-call]
        by_expert = _places_by_expert(taken, tokens.device)
        outputs = compute(arrived[by_expert], [sum(each) for each in zip(*taken, strict=True)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=tokens.device)
        returned: Tensor = _AllToAll.apply(outputs[back], sent, received, self)  # type: ignore[no-untyped-call]
        return returned

    def _told(self, counts: list[int], device: torch.device) -> list[list[int]]:
        """Return how many tokens this rank gets from each rank, for each of its own experts."""
        own = len(counts) // self.size
        told = torch.tensor(counts, dtype=torch.int64, device=device)
        taken = torch.empty_like(told)
        if not self.exchange(taken, told, None, None):
            return [counts[:own]] * self.size
        rows: list[list[int]] = taken.view(self.size, own).tolist()
        return rows

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


class _AllToAll(Function):
    """All-to-all of rows `(R, hidden)`; the backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], axis: ExpertAxis) -> Tensor:
        ctx.received, ctx.sent, ctx.axis = received, sent, axis
        return _sent(rows, received, sent, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sent(gradients[0].contiguous(), ctx.sent, ctx.received, ctx.axis), None, None, None


def _sent(rows: Tensor, received: list[int], sent: list[int], axis: ExpertAxis) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[-1])
    axis.exchange(output, rows.contiguous(), received, sent)
    return output


def _places_by_expert(taken: list[list[int]], device: torch.device) -> Tensor:
    """Return the places of rows that arrive rank by rank, in the order of the experts."""
    starts, places = [0], []
    for row in taken:
        for count in row:
            starts.append(starts[-1] + count)
    width = len(taken[0])
    for expert in range(width):
        for rank, row in enumerate(taken):
            start = starts[rank * width + expert]
            places.append(torch.arange(start, start + row[expert], device=device))
    return torch.cat(places)
