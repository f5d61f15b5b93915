"""Resumes a user's optimizer on tiny copies of its parameters, to refuse one that a checkpoint would change.

steps ── save ── more steps                  the weights and the state at the end must be the same
└──── load into a new one ── more steps
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.optimizer_state import load_state, state_to_fill, state_to_save
from shardscope.training.checkpoint.optimizer_trees import entry_text
from shardscope.training.checkpoint.values import decode, encode
from shardscope.training.optim.holding import Holding
from shardscope.training.optim.state import NamedOptimizer, alike, built_again, tensors_in
from shardscope.training.random_state import random_state, seed_everything, set_random_state

_BEFORE, _AFTER = 3, 9
"""Numbers of steps before and after the save; some optimizers act only in every fifth step."""
_LARGEST = 5
"""Largest number of elements in a dimension."""
_ALONE = Holding("rehearsal")


@dataclass(frozen=True)
class Rehearsed:
    """How a resume went on one rank.

    Attributes:
        problem: What a checkpoint would change; None if nothing.
        untried: Why the optimizer could not be tried; None if it was, or if the rank has nothing to update.
    """

    problem: str | None = None
    untried: str | None = None


def rehearsed(named: NamedOptimizer, *, is_split: bool, is_resized: bool) -> Rehearsed:
    """Try to save and resume an optimizer on one rank, without any call of another rank.

    Args:
        named: The job's optimizer; it does not step.
        is_split: Whether ranks hold pieces of parameters.
        is_resized: Whether other numbers of ranks may resume from what is saved, and hold other parameters or pieces.
    """
    held = next((p for p in named.parameters.values() if p.numel()), None)
    if held is None:
        return Rehearsed()
    with _random_numbers_kept(held.device):
        try:
            tried, *again = [_Tried.of(named, seed=seed) for seed in ((1, 1, 2) if is_resized else (1,))]
        except Exception as error:  # noqa: BLE001 - anything in the user's code; the job's own parameters may suit it
            return Rehearsed(untried=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        problem = _problem(tried)
        if problem is None and is_resized:
            problem = _indivisible(*again, is_split=is_split)
    return Rehearsed(problem)


def _problem(tried: _Tried) -> str | None:
    try:
        saved = _Memory(state_to_save(tried.named, None, _ALONE))
    except CheckpointError as error:
        return str(error).partition(";")[0]
    try:
        again = tried.built_anew()
        asked = state_to_fill(again.named, saved, _ALONE, within="", rank=0)
        load_state(again.named, saved.fill(asked), _ALONE, rank=0)
        lost = _difference(_dictionary(tried.named), _dictionary(again.named))
        if lost is not None:
            return f"{lost} of its state_dict() does not come back equal"
        forgotten = _difference(_attributes(tried.named.optimizer), _attributes(again.named.optimizer))
        for number in range(_BEFORE, _BEFORE + _AFTER):
            for each in (tried, again):
                each.step(number)
    except Exception as error:  # noqa: BLE001 - anything in the user's code; the new one fails where the first does not
        return f"after a resume it fails with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    same = all(map(alike, tried.weights, again.weights))
    if same and alike(tried.named.sections(), again.named.sections()):
        return None
    if forgotten is None:
        return "what its steps depend on is not all in its state_dict()"
    return f"its attribute {forgotten}, on which its steps depend, is not in its state_dict()"


def _indivisible(one: _Tried, other: _Tried, *, is_split: bool) -> str | None:
    """Return which entry other ranks could not take over, because it depends on the parameters of a rank."""
    found, theirs = one.named.sections(), other.named.sections()
    for section, entries in found.items():
        is_of_parameter = "state." in section
        if is_of_parameter and not is_split:
            continue
        piece = one.named.parameters.get(section.partition("state.")[2])
        for key, value in entries.items():
            if isinstance(value, Tensor) and piece is not None and value.shape == piece.shape:
                continue
            shaped = is_of_parameter and any(tensor.numel() > 1 for tensor in tensors_in(value))
            if shaped or not alike(value, theirs.get(section, {}).get(key)):
                text = entry_text(section, key)
                return f"{text} depends on the parameters of a rank, and other ranks cannot take it over"
    return None


@dataclass(frozen=True)
class _Tried:
    """An optimizer on tiny copies of the job's parameters; a user's build method may ask for any of them by name."""

    job: NamedOptimizer
    named: NamedOptimizer

    @classmethod
    def of(cls, job: NamedOptimizer, *, seed: int) -> _Tried:
        """Return the optimizer after its first steps."""
        numbers = torch.Generator().manual_seed(seed)
        tiny = {
            p: torch.randn([min(n, _LARGEST) for n in p.shape], generator=numbers)
            for p in job.names
            if p.requires_grad and not p.is_meta
        }
        tried = cls._built(job, {p: values.to(p.device, p.dtype) for p, values in tiny.items()})
        for number in range(_BEFORE):
            tried.step(number, seed)
        return tried

    @classmethod
    def _built(cls, job: NamedOptimizer, weights: Mapping[Tensor, Tensor]) -> _Tried:
        copies = {p: nn.Parameter(values.clone()) for p, values in weights.items()}
        built = built_again(job.optimizer, copies, alone=True)
        return cls(job, NamedOptimizer(built, {copy: job.names[p] for p, copy in copies.items()}))

    def built_anew(self) -> _Tried:
        """Return a new optimizer for copies of the parameters."""
        originals = {name: p for p, name in self.job.names.items()}
        return self._built(self.job, {originals[name]: p.detach() for p, name in self.named.names.items()})

    @property
    def weights(self) -> list[Tensor]:
        """The parameters."""
        return [*self.named.names]

    def step(self, number: int, seed: int = 1) -> None:
        """Take a step; its gradients and random numbers depend on its number."""
        seed_everything(1000 * seed + number)
        numbers = torch.Generator().manual_seed(1000 * seed + number)
        for parameter in self.weights:
            grad = torch.randn(parameter.shape, generator=numbers)
            if grad.numel():  # an optimizer may fail with empty pieces, which need no step
                parameter.grad = grad.to(parameter.device, parameter.dtype)
        optimizer = self.named.optimizer
        for group, built in zip(optimizer.param_groups, self.job.optimizer.param_groups, strict=True):
            group["lr"] = built["lr"]  # as the job's schedule sets it
        optimizer.step()


def _difference(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> str | None:
    """Return the name of the first value that differs in nested dictionaries and objects; None if there is none."""
    for key, value in one.items():
        theirs = other.get(key)
        if theirs is None and value == {}:  # a parameter without entries
            continue
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            inside = _difference(value, theirs)
            if inside is not None:
                return inside if isinstance(key, int) or key == "state" else repr(key)
        elif isinstance(value, torch.optim.Optimizer) and isinstance(theirs, torch.optim.Optimizer):
            continue  # compared by its own state
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type) and not callable(value):
            if type(value) is type(theirs) and _difference(vars(value), vars(theirs)) is not None:
                return repr(key)
        elif not callable(value) and not alike(value, theirs):
            return repr(key)
    return None


def _dictionary(named: NamedOptimizer) -> Mapping[str, Any]:
    """Return the optimizer's `state_dict` without learning rates and what its steps have not changed: settings."""
    try:
        found = named.optimizer.state_dict()
        settings = {key for group in named.optimizer.param_groups for key in group}
        settings -= {
            key for section, entries in named.sections().items() if "group." in section for key in entries
        }
        groups = [
            {key: value for key, value in group.items() if key not in {"lr", *settings}}
            for group in found["param_groups"]
        ]
    except Exception:  # noqa: BLE001 - anything in the user's code; what it keeps is compared by its steps
        return {}
    return {**found, "param_groups": groups}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    ours = {"state", "param_groups", "defaults", "_step_count", "_opt_called"}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ours and not name.startswith("_optimizer_")
    }


class _Memory:
    """A checkpoint in memory, with values as they come back from JSON."""

    def __init__(self, flat: Mapping[str, Any]) -> None:
        tensors = {key: value for key, value in flat.items() if isinstance(value, Tensor)}
        self._tensors = {key: t.clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
        self._values = {
            key: json.dumps(encode(key, value)) for key, value in flat.items() if key not in self._tensors
        }

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and values."""
        return {*self._tensors, *self._values}

    def described(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a tensor; None if it is not a tensor."""
        held = self._tensors.get(key)
        return None if held is None else (tuple(held.shape), held.dtype)

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with the saved tensors and values."""
        return {
            key: value.copy_(self._tensors[key])
            if isinstance(value, Tensor)
            else decode(json.loads(self._values[key]))
            for key, value in state.items()
        }


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    kept = random_state(device)
    try:
        yield
    finally:
        set_random_state(kept, device)
