"""The state of an optimizer by name, as checkpoints store it; reading it never takes a step.

    state.NAME     entries of the parameter NAME: tensors of its shape, and anything else that the optimizer keeps
    group.NAME     values of the parameter's group that have changed since the optimizer was built, such as counters
    removed.NAME   names of values that the group no longer has
    shared         entries of `optimizer.state` that belong to no parameter
    attributes     numbers, strings and collections of them among the optimizer's attributes that have changed

Settings and the learning rate are not state: they come from the job. If an attribute is itself an optimizer, its
sections are ``ATTRIBUTE:state.NAME`` and so on.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.optim.holding import bytes_of

STEP = "step"
"""Key of PyTorch's step count, a single number that may be on the host although its parameter is not."""
SHARED, ATTRIBUTES = "shared", "attributes"
Sections = dict[str, dict[Any, Any]]
_NOT_STATE = {"params", "param_names", "lr"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ABSENT = object()
_BUILT = "_optimizer_as_built"
"""Attribute of an optimizer with its state before its first step. A table of the module would keep this in memory, and
through it the strategy and the optimizer itself. The attributes of torch's own hooks have such names, too."""
Again = Callable[[Mapping[Tensor, torch.nn.Parameter], bool], torch.optim.Optimizer]
"""Function that builds an optimizer for copies of some parameters, perhaps without functions that sum over ranks."""


@dataclass(frozen=True)
class _Built:
    """State of an optimizer before its first step."""

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    again: Again | None = None


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer, and the names of its parameters in checkpoints.

    Attributes:
        optimizer: The optimizer.
        names: Name of each parameter.
        within: Prefix of the names of sections, if the optimizer is an attribute of another one.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[Tensor, str]
    within: str = field(default="")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The optimizer's parameters by name."""
        return {
            self._name(p): p for group in self.optimizer.param_groups for p in group["params"]
        }  # fmt: skip

    def inner(self) -> Iterator[NamedOptimizer]:
        """Yield this optimizer, and the optimizers that are attributes of it."""
        yield self
        for name, value in vars(self.optimizer).items():
            if isinstance(value, torch.optim.Optimizer) and value is not self.optimizer:
                yield from NamedOptimizer(value, self.names, f"{self.within}{name}:").inner()

    def sections(self) -> Sections:
        """Return the complete state that the optimizer needs to resume."""
        return {
            f"{one.within}{name}": entries
            for one in self.inner()
            for name, entries in one.own_sections()
            if entries
        }

    def own_sections(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yield the sections of this optimizer, without those of optimizers inside it."""
        shared: dict[Any, Any] = {}
        for key, entries in self.optimizer.state.items():
            if isinstance(key, Tensor):
                yield f"state.{self._name(key)}", self._entries(key, entries)
            else:
                shared[key] = entries
        yield SHARED, shared
        built = _built(self.optimizer) or _Built([], {})
        for number, group in enumerate(self.optimizer.param_groups):
            before = built.groups[number] if number < len(built.groups) else {}
            changed = _changed(before, {k: v for k, v in group.items() if k not in _NOT_STATE})
            removed = dict.fromkeys(before.keys() - group.keys())
            for parameter in group["params"]:
                yield f"group.{self._name(parameter)}", changed
                yield f"removed.{self._name(parameter)}", removed
        yield ATTRIBUTES, _changed(built.attributes, _attributes(self.optimizer))

    def load(self, sections: Mapping[str, Mapping[Any, Any]]) -> None:
        """Restore the result of `sections`; state that is missing there stays unchanged.

        Raises:
            CheckpointError: Parameters in the same group were saved with different values of the group.
        """
        for one in self.inner():
            own = {
                name.removeprefix(one.within): entries
                for name, entries in sections.items()
                if name.startswith(one.within)
            }
            one.load_own(own)

    def load_own(self, sections: Mapping[str, Mapping[Any, Any]]) -> None:
        """Restore the sections of this optimizer, without those of optimizers inside it."""
        for name, parameter in self.parameters.items():
            if f"state.{name}" in sections:
                _update(self.optimizer.state.setdefault(parameter, {}), sections[f"state.{name}"])
        _update(self.optimizer.state, sections.get(SHARED, {}))
        for group in self.optimizer.param_groups:
            found = [sections.get(f"group.{self._name(p)}", {}) for p in group["params"]]
            for values in found[1:]:
                for key in values.keys() | found[0].keys():
                    if not alike(values.get(key, _ABSENT), found[0].get(key, _ABSENT)):
                        raise CheckpointError(differing(str(key)))
            _update(group, found[0] if found else {})
            for key in {key for p in group["params"] for key in sections.get(f"removed.{self._name(p)}", {})}:
                group.pop(key, None)
        for name, value in sections.get(ATTRIBUTES, {}).items():
            setattr(self.optimizer, name, value)

    def _entries(self, parameter: Tensor, held: Any) -> dict[Any, Any]:
        if not isinstance(held, Mapping):
            raise CheckpointError(
                f"{type(self.optimizer).__name__} keeps a {type(held).__name__}, not a dictionary, as the state of "
                f"parameter {self._name(parameter)!r}; make it a dictionary of entries"
            )
        return dict(held)

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self.names:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} updates a tensor of shape {tuple(parameter.shape)} that is not a "
                "parameter of the model, so a checkpoint cannot name its state; let it update the given parameters"
            )
        return self.names[parameter]


def differing(entry: str) -> str:
    """Return the message about an entry whose values on several ranks cannot be combined."""
    return (
        f"the optimizer's entry {entry!r} differs between the ranks that saved it, and cannot be divided among other "
        "ranks; resume with the strategy and the world size that saved it"
    )


def note_as_built(
    optimizer: torch.optim.Optimizer,
    again: Again | None = None,
) -> None:
    """Record the state of an optimizer before its first step, to recognise later what its steps have changed."""
    for one in [*NamedOptimizer(optimizer, {}).inner()]:  # to which this adds attributes
        groups = [
            {key: _copied(value) for key, value in group.items() if key not in _NOT_STATE}
            for group in one.optimizer.param_groups
        ]
        vars(one.optimizer)[_BUILT] = _Built(groups, _copied(_attributes(one.optimizer)), again)


def _built(optimizer: torch.optim.Optimizer) -> _Built | None:
    """Return the state of an optimizer before its first step; None if it was not recorded."""
    found: _Built | None = vars(optimizer).get(_BUILT)
    return found


def _copied(value: Any) -> Any:
    """Return a copy of a value, part by part; parts that cannot be copied, such as a process group, are kept
    unchanged.
    """
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, Tensor) and not value.is_leaf:  # cannot be deep-copied
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - anything in the user's code
        return value


def built_again(
    optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, torch.nn.Parameter], *, alone: bool = False
) -> torch.optim.Optimizer:
    """Return a new optimizer with the same settings for copies of some of the parameters.

    Args:
        optimizer: An optimizer that `note_as_built` has been called for.
        copies: The copies by the parameters.
        alone: Whether to build it without functions that sum over ranks.
    """
    as_built = _built(optimizer)
    assert as_built is not None
    assert as_built.again is not None
    built = as_built.again(copies, alone)
    note_as_built(built)
    return built


def complete(named: NamedOptimizer) -> None:
    """Add the entries that the job's settings need and the loaded state lacks, with their initial values.

    A throwaway optimizer for copies of the parameters creates them. All ranks must call this, because a step may sum
    norms over ranks.
    """
    optimizer = named.optimizer
    if not optimizer.state:
        return
    copies = {p: torch.nn.Parameter(p.detach().clone()) for p in named.parameters.values()}
    for each in copies.values():
        each.grad = torch.zeros_like(each)
    other = built_again(optimizer, copies)
    other.step()
    for parameter, each in copies.items():
        held, fresh = optimizer.state.get(parameter), other.state.get(each, {})
        for key in fresh.keys() - (held or fresh).keys():
            assert held is not None
            held[key] = fresh[key].zero_() if key == STEP else fresh[key]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | deque)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif _is_sequence(value):
        for part in value:
            yield from tensors_in(part)


def alike(one: Any, other: Any) -> bool:
    """Return whether two values, such as nested collections of tensors, are bitwise identical."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if _is_sequence(one):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        return _alike_tensors(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    same = repr(one) == repr(other) if isinstance(one, float | complex) else one == other  # NaN and -0.0
    return bool(same) if isinstance(same, bool) else bool(getattr(same, "all", bool)()) or one is other


def _alike_tensors(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout != torch.strided:
        return torch.equal(one, other)
    return torch.equal(bytes_of(one), bytes_of(other))


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if not alike(before.get(key, _ABSENT), value)}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that can be restored: numbers, strings, and collections of them."""
    ignored = {"state", "param_groups", "defaults", "_optimizer_step_pre_hooks", "_opt_called", "_step_count"}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ignored and not name.startswith("_optimizer_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(part) for key, part in value.items())
    return type(value) in _PLAIN or (type(value) is Tensor and value.dim() == 0)


def _update(held: Any, loaded: Mapping[Any, Any]) -> None:
    """Overwrite entries; a tensor that fits is overwritten in place, as the optimizer may have views of it."""
    for key, value in loaded.items():
        mine = held.get(key)
        fits = isinstance(mine, Tensor) and isinstance(value, Tensor)
        if fits and _form(mine) == _form(value):
            mine.detach().copy_(value)
        else:
            held[key] = value


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
