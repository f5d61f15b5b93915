"""Trial resume of a user's optimizer on tiny copies of its parameters; rejects one that a checkpoint would change.

steps ── save ── more steps                  the weights and the state at the end must be the same
└──── load into a new one ── more steps
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.optimizer_state import load_state, state_to_fill, state_to_save
from shardscope.training.checkpoint.optimizer_trees import entry_text
from shardscope.training.checkpoint.values import decode, encode
from shardscope.training.optim.holding import Holding
from shardscope.training.optim.state import NamedOptimizer, Sections, alike, tensors_in
from shardscope.training.optim.trial import Trial, failure_text
from shardscope.training.optim.user_defined import random_numbers_of

_BEFORE, _AFTER = 3, 9
"""Number of steps before the save and after it; some optimizers change their state only in every fifth step."""
_ALONE = Holding("rehearsal")


@dataclass(frozen=True)
class Rehearsed:
    """Result of a trial resume on one rank.

    Attributes:
        problem: What a checkpoint would change; None if it changes nothing.
        untried: Why the optimizer could not be tried; None if it was tried, or if the rank has nothing to update.
    """

    problem: str | None = None
    untried: str | None = None


def rehearsed(named: NamedOptimizer, *, is_split: bool, is_resized: bool) -> Rehearsed:
    """Try to save and resume an optimizer on one rank, without communication.

    Args:
        named: The job's optimizer; it does not step.
        is_split: Whether ranks hold pieces of parameters.
        is_resized: Whether a different number of ranks may resume from the saved state, each with other parameters or
            pieces.
    """
    held = next((p for p in named.parameters.values() if p.numel()), None)
    if held is None:
        return Rehearsed()
    with random_numbers_of(lambda: [0], held.device):
        try:
            tried, *again = [_after_first_steps(named, seed) for seed in ((1, 1, 2) if is_resized else (1,))]
        except Exception as error:  # noqa: BLE001 - anything in the user's code; the job's own parameters may suit it
            return Rehearsed(untried=failure_text(error))
        problem = _problem(tried)
        if problem is None and is_resized:
            problem = _indivisible(*again, is_split=is_split)
    return Rehearsed(problem)


def _after_first_steps(named: NamedOptimizer, seed: int) -> Trial:
    tried = Trial.of(named, seed=seed)
    for number in range(_BEFORE):
        tried.step(number, seed)
    return tried


def _problem(tried: Trial) -> str | None:
    try:
        saved = _Memory(state_to_save(tried.named, None, _ALONE))
    except CheckpointError as error:
        return str(error).partition(";")[0]
    except RecursionError:
        return "its state contains itself"
    try:
        again = tried.built_anew()
        asked = state_to_fill(again.named, saved, _ALONE, within="", rank=0)
        load_state(again.named, saved.fill(asked), _ALONE, rank=0)
        lost = _difference(_dictionary(tried.named), _dictionary(again.named))
        if lost is not None:
            return f"{lost} of its state_dict() is not the same after loading"
        forgotten = _difference(_attributes(tried.named.optimizer), _attributes(again.named.optimizer))
        for number in range(_BEFORE, _BEFORE + _AFTER):
            for each in (tried, again):
                each.step(number)
    except Exception as error:  # noqa: BLE001 - anything in the user's code; the new one fails where the first does not
        return f"after a resume it fails with {failure_text(error)}"
    return _differing_end(tried, again, forgotten)


def _differing_end(tried: Trial, again: Trial, forgotten: str | None) -> str | None:
    """Describe how the final states of two runs differ; `forgotten` is an attribute that differed after the resume."""
    unlike = _unlike(tried.named.sections(), again.named.sections())
    if unlike is None and all(map(alike, tried.weights, again.weights)):
        return None
    if forgotten is not None:
        return f"its attribute {forgotten}, on which its steps depend, is not in its state_dict()"
    if unlike is None:
        return "its state_dict() does not contain everything on which its steps depend"
    return (
        f"{unlike} continues differently after a resume, because it shares memory with another tensor or "
        "collection, or "
        "depends on what is not in the state_dict()"
    )


def _unlike(one: Sections, other: Sections) -> str | None:
    """Return a description of the first entry that differs; None if all are equal."""
    missing = object()
    for section, entries in one.items():
        theirs = other.get(section, {})
        for key in entries | theirs:
            if not alike(entries.get(key, missing), theirs.get(key, missing)):
                return entry_text(section, key)
    return None


def _indivisible(one: Trial, other: Trial, *, is_split: bool) -> str | None:
    """Describe an entry that other ranks cannot load, because it depends on a rank's parameters; None if none does."""
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
    """Return the optimizer's `state_dict` without learning rates and settings, which its steps do not change."""
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
