"""The optimizers that update an observed model: one, several, wrappers around others, or one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardscope.training.tensors_in import tensors_in


class Optimizers:
    """All optimizers that have updated parameters of a model so far.

    Args:
        model: The model.
        given: The optimizer that the user passed; None if there is none.
    """

    def __init__(self, model: nn.Module, given: Optimizer | None) -> None:
        self._model = model
        self._known: dict[int, Optimizer] = {}
        for each in [] if given is None else [given, *inside(given)]:
            self._known[id(each)] = each

    def take(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates a parameter of the model, and remember it if so."""
        if id(optimizer) not in self._known and _updates(optimizer, self._model):
            self._known |= {id(each): each for each in (optimizer, *inside(optimizer))}
        return id(optimizer) in self._known

    @property
    def state(self) -> list[Tensor]:
        """Every tensor in their states, at any depth, each once."""
        return tensors_in([[*each.state.values()] for each in self._known.values()])

    @property
    def count(self) -> int:
        """Number of them that keep state of their own."""
        return len({id(each.state) for each in self._known.values() if tensors_in([*each.state.values()])})


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer wraps, at any depth, in the order of its attributes."""
    found: dict[int, Optimizer] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Optimizer):
            if id(one) in found:
                continue
            found[id(one)] = one
            waiting += reversed([each for name, each in vars(one).items() if name not in _TORCHS_OWN])
        elif isinstance(one, Mapping):
            waiting += reversed([*one.values()])
        elif isinstance(one, list | tuple):
            waiting += reversed(one)
    return [each for each in found.values() if each is not optimizer]


_TORCHS_OWN = frozenset({"state", "param_groups", "defaults"})


def _updates(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
