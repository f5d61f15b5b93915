"""The order in which gradients come, by which `DistributedDataParallel` cuts its buckets for good.

It starts with buckets in the parameters' reverse order, and cuts them anew before its second forward pass, in the order
in which the gradients of its first backward pass came. Which terms of a ring's sums are added first depends on where in
a bucket an element lies. So a run that goes on from a checkpoint must have the buckets of the run before in its first
step already: the order is saved with the checkpoint, and brought about by a pass over a module that has nothing but the
parameters, before the model has seen any data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class Arrivals:
    """Notes in which order the gradients of a model come, until told to stop.

    Attributes:
        names: The trained parameters whose gradients have come, in the order of the last backward pass.
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
            self.names.clear()  # the next micro-batch; buckets are cut by the last, whose gradients are exchanged
        self.names.append(name)

    def stop(self) -> None:
        """Note no more; costs nothing where it has been called before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class InOrder(nn.Module):
    """Takes the place of a model in a pass without data: parameters get gradients of zero in a certain order."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)  # not its own: whatever it is put into keeps its names

    def forward(self) -> Tensor:
        """Zero. The backward pass goes through a chain of sums from its last term to its first."""
        total = self._in_order[0].new_zeros(())
        for parameter in reversed(self._in_order):
            total = total + 0 * parameter.sum()
        return total
