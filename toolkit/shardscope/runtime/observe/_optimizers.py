"""The optimizers that update an observed model: one, several, one per parameter, or wrappers of other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
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
        """All tensors in the optimizers' states, at any depth, each once."""
        return tensors_in([[*each.state.values()] for each in self._known.values()])

    @property
    def count(self) -> int:
        """Number of optimizers that keep their own state."""
        return len({id(each.state) for each in self._known.values() if tensors_in([*each.state.values()])})


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer wraps, at any depth, in the order of its attributes.

    Optimizers in the user's own containers are not found, because looking into these would run the user's code.
    """
    found: dict[int, Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += reversed([*_held_by(one)])
    return [each for each in found.values() if each is not optimizer]


def rate_of(optimizer: Optimizer, *names: str) -> float | None:
    """Return the learning rate of an optimizer, or else of the first wrapped optimizer that has one; None if there is
    none.

    Args:
        optimizer: The optimizer.
        names: Entries of a parameter group that may contain the rate, in order of preference.
    """
    for each in (optimizer, *inside(optimizer)):
        group: Mapping[str, Any] = next(iter(each.param_groups), {})
        for name in names:
            if isinstance(group.get(name), Tensor | float | int):
                return float(group[name])
    return None


def _held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers in an optimizer's attributes, and in lists, tuples and dicts in these."""
    for name, value in vars(optimizer).items():
        if name not in _TORCHS_OWN:
            values = _AS_LISTS.get(type(value), lambda one: [one])(value)
            # `isinstance` would ask the user's objects for their class
            yield from (each for each in islice(values, _MOST) if issubclass(type(each), Optimizer))


_AS_LISTS: dict[type, Callable[[Any], Iterable[Any]]] = {list: iter, tuple: iter, dict: dict.values}
_MOST = 10_000
"""Number of elements of a container that are inspected: enough for one optimizer per parameter."""
_TORCHS_OWN = frozenset({"state", "param_groups", "defaults"})


def _updates(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
