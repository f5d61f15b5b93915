"""Hooks around an FSDP2 unit, so that FSDP2 handles all forms in which a unit can receive and return tensors.

FSDP2 gathers a unit's parameters before the unit's backward pass. To detect the start of that pass, it registers hooks
on the tensors that the unit returned, but it finds them only in tuples, mappings and dataclasses. `UnitBoundary`
registers the hooks on all other results: tensors in objects of other classes, in an attribute of the module (such as
the load-balancing loss of a mixture of experts), or written into a dict, list or dataclass that the unit received as an
argument. A unit without any such tensor raises an error.

FSDP2 also inserts its own autograd nodes after a unit's inputs. To do so, it copies the dicts, lists and dataclasses
that contain the inputs, so results that the unit writes into them would be lost. `UnitBoundary` therefore hides these
arguments from FSDP2. If all arguments of a unit are hidden, its gradients are reduced at the end of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.training._compat import before_backward
from shardscope.training.tensors_in import tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class UnitBoundary:
    """Hooks on the inputs and outputs of one unit.

    FSDP2's hooks must run between the two sets of hooks registered here, and the user's hooks outside of both. For
    this, use the following order:

        boundary = UnitBoundary(name, unit, strategy)
        fully_shard(unit, ...)
        boundary.surround()

    Args:
        name: The unit's name, for messages.
        unit: The module.
        strategy: The strategy's name, for messages.
    """

    def __init__(self, name: str, unit: Any, strategy: str) -> None:
        self.name, self.unit, self.strategy = name, unit, strategy
        self.given: list[_Hidden] = []
        self.modules = [(module, _names_of(module)) for module in unit.modules()]
        """Modules of the unit, each with the names of attributes that cannot be results of the user's code, because
        PyTorch or FSDP2 has set them."""
        unit.register_forward_pre_hook(self._uncover, prepend=True, with_kwargs=True)

    def surround(self) -> None:
        """Register the outer hooks; called after `fully_shard`."""
        self.modules = [
            (module, _MODULE_ATTRIBUTES | (_names_of(module) - before)) for module, before in self.modules
        ]
        self.gather = before_backward(self.unit)
        self.unit.register_forward_pre_hook(self._hide, prepend=True, with_kwargs=True)
        self.unit.register_forward_hook(self._returned)

    def _hide(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        arguments = (*args, *kwargs.values())
        self.given = [_Hidden(value) for value in arguments if _can_be_written_to(value)]
        if not self.given:
            return None
        hidden = {id(cover.value): cover for cover in self.given}
        covered = {key: hidden.get(id(value), value) for key, value in kwargs.items()}
        return tuple(hidden.get(id(value), value) for value in args), covered

    def _uncover(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self.given:
            return None
        return tuple(map(_uncovered, args)), {key: _uncovered(value) for key, value in kwargs.items()}

    def _returned(self, _: nn.Module, __: Any, output: Any) -> None:
        written, self.given = [tensor for cover in self.given for tensor in cover.written()], []
        if not torch.is_grad_enabled():
            return
        apart = [*written, *self._attribute_results()]
        if isinstance(output, Tensor) and not apart:
            return  # FSDP2 registers its hook on a single tensor itself
        tensors = [tensor for tensor in tensors_in([output, apart]) if tensor.requires_grad]
        if not tensors:
            self._refuse(output)
        for tensor in tensors:
            tensor.register_hook(self.gather)

    def _attribute_results(self) -> list[Tensor]:
        """Return the results in attributes of the unit's modules; they can differ from pass to pass."""
        kept = [
            vars(module)[key]
            for module, others in self.modules
            for key in vars(module).keys() - others
            if not key.startswith("__")  # FSDP2 keeps the state of a nested unit there
        ]
        return [tensor for tensor in tensors_in(kept) if tensor.grad_fn is not None]

    def _refuse(self, output: Any) -> None:
        if not any(parameter.requires_grad for parameter in self.unit.parameters()):
            return
        raise SpecError(
            f"layer {self.name!r} returned {type(output).__name__} without a tensor that depends on its parameters, "
            f"but strategy={self.strategy!r} needs the gradient of such a tensor to know when to gather the "
            "parameters; return the tensors that the layer computes, in a tuple, a mapping or an object's attributes"
        )


class _Hidden:
    """Wrapper that hides an argument from FSDP2, with a list of the tensors in it before the unit ran."""

    def __init__(self, value: Any) -> None:
        self.value, self.before = value, tensors_in(value)

    def written(self) -> list[Tensor]:
        """Return the tensors that the unit has added to the argument."""
        known = {id(tensor) for tensor in self.before}
        return [tensor for tensor in tensors_in(self.value) if id(tensor) not in known]


def _names_of(module: nn.Module) -> frozenset[str]:
    return frozenset(vars(module))


_MODULE_ATTRIBUTES = _names_of(nn.Module())


def _can_be_written_to(value: Any) -> bool:
    """Return whether a unit could write results into this argument."""
    if isinstance(value, Tensor | str | int | float | None):
        return False
    return any(map(_can_be_written_to, value)) if isinstance(value, tuple) else not callable(value)


def _uncovered(value: Any) -> Any:
    return value.value if isinstance(value, _Hidden) else value
