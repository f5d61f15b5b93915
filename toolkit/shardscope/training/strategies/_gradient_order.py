"""Saves and restores the order in which gradients arrive, which determines the buckets of `DistributedDataParallel`.

`DistributedDataParallel` starts with buckets in the reverse order of the parameters. Before the second forward pass it
rebuilds the buckets in the order in which gradients arrived in the first backward pass. In a ring all-reduce, the order
of the additions depends on an element's position in its bucket. So for bitwise identical results, a resumed run must
have the buckets of the interrupted run from its first step on. The order is therefore saved in the checkpoint. It is
restored by a backward pass through a module that has the parameters but needs no data (`ZeroGradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class GradientOrder:
    """Records the order in which a model's gradients arrive, until `stop` is called.

    Attributes:
        names: Names of the trained parameters, in the order in which their gradients arrived in the last backward pass.
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
            self.names.clear()  # a new micro-batch begins; the last micro-batch of the step determines the buckets
        self.names.append(name)

    def stop(self) -> None:
        """Stop recording; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class ZeroGradients(nn.Module):
    """Module that replaces the model in a pass without data; its backward gives zero gradients in a given order."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._in_order = tuple(
            parameters
        )  # a tuple, so that the parameters are not registered here and keep their names in the model

    def forward(self) -> Tensor:
        """Return zero, as a chain of sums whose backward pass reaches the parameters in the given order."""
        total = self._in_order[0].new_zeros(())
        for parameter in reversed(self._in_order):
            total = total + 0 * parameter.sum()
        return total
