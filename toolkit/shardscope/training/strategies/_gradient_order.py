"""The order in which gradients arrive, which decides `DistributedDataParallel`'s final buckets.

`DistributedDataParallel` starts with buckets in the parameters' reverse order. Before its second forward pass it
rebuilds them in the order in which the gradients of its first backward pass arrived. In a ring, the order in which
terms are summed depends on an element's place in its bucket. So a resumed run must have the buckets of the run before
in its first step already. The order is saved with the checkpoint and restored by a pass over a module that has only the
parameters, before the model has seen any data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class GradientOrder:
    """Records the order in which a model's gradients arrive, until `stop` is called.

    Attributes:
        names: The trained parameters whose gradients have arrived, in the order of the last backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: list[str] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _arrived(self, name: str, _: Tensor) -> None:
        if len(self.names) == len(self._handles):
            self.names.clear()  # next micro-batch; the last one, whose gradients are exchanged, decides the buckets
        self.names.append(name)

    def stop(self) -> None:
        """Stop recording; further calls cost nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class InOrder(nn.Module):
    """Stands in for a model in a pass without data: parameters get zero gradients in a given order."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(
            parameters
        )  # a tuple, so they are not registered and the outer module keeps its names

    def forward(self) -> Tensor:
        """Return zero. The backward pass goes through a chain of sums from its last term to its first."""
        total = self._in_order[0].new_zeros(())
        for parameter in reversed(self._in_order):
            total = total + 0 * parameter.sum()
        return total
