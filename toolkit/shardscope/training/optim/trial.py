"""Trial of a user's optimizer on copies of the job's parameters, to examine its steps and state before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardscope.training.optim.state import NamedOptimizer, built_again, tensors_in
from shardscope.training.optim.user_defined import gradients_for_step
from shardscope.training.random_state import seed_everything

SMALL = 5
"""Largest number of elements in a dimension of small copies."""
_SCALES = (1e-3, 1.0, 1e3)
"""Scale of the gradients of each step in which updates of parts and of whole tensors are compared: thresholds, such as
the largest norm of a gradient, are below some and above others.
"""
_SAME = 1e-5
"""Largest difference that rounding explains, in fp32."""


@dataclass(frozen=True)
class Trial:
    """An optimizer on copies of the job's parameters; a user's build method may ask for any of them by name.

    Attributes:
        job: The job's optimizer.
        named: The optimizer of the copies.
        alone: Whether it was built without functions that sum over ranks.
    """

    job: NamedOptimizer
    named: NamedOptimizer
    alone: bool

    @classmethod
    def of(
        cls, job: NamedOptimizer, *, seed: int = 1, largest: int | None = SMALL, alone: bool = True
    ) -> Trial:
        """Return a new optimizer for random weights, with at most `largest` elements in a dimension."""
        numbers = torch.Generator().manual_seed(seed)
        weights = {
            p: torch.randn([n if largest is None else min(n, largest) for n in p.shape], generator=numbers)
            for p in job.names
            if p.requires_grad and not p.is_meta
        }
        return cls._built(
            job, {p: values.to(p.device, p.dtype) for p, values in weights.items()}, alone=alone
        )

    @classmethod
    def _built(cls, job: NamedOptimizer, weights: Mapping[Tensor, Tensor], *, alone: bool) -> Trial:
        copies = {p: nn.Parameter(values.clone()) for p, values in weights.items()}
        built = built_again(job.optimizer, copies, alone=alone)
        return cls(job, NamedOptimizer(built, {copy: job.names[p] for p, copy in copies.items()}), alone)

    def built_anew(self) -> Trial:
        """Return a new optimizer for copies of the weights."""
        originals = {name: p for p, name in self.job.names.items()}
        weights = {originals[name]: p.detach() for p, name in self.named.names.items()}
        return self._built(self.job, weights, alone=self.alone)

    @property
    def weights(self) -> list[Tensor]:
        """The copied parameters that the optimizer updates."""
        return [*self.named.names]

    def step(self, number: int, seed: int = 1, *, skips_empty: bool = True) -> None:
        """Take a step; its gradients and random numbers depend on its number."""
        numbers = torch.Generator().manual_seed(1000 * seed + number)
        gradients = [torch.randn(parameter.shape, generator=numbers) for parameter in self.weights]
        self.step_with(gradients, 1000 * seed + number, skips_empty=skips_empty)

    def step_with(self, gradients: Sequence[Tensor], seed: int, *, skips_empty: bool = True) -> None:
        """Take a step with the given gradients of `weights`, and with random numbers that depend on `seed`."""
        seed_everything(seed)
        for parameter, grad in zip(self.weights, gradients, strict=True):
            parameter.grad = grad.to(parameter.device, parameter.dtype, copy=True)  # a step may change it
        optimizer = self.named.optimizer
        for group, built in zip(optimizer.param_groups, self.job.optimizer.param_groups, strict=True):
            group["lr"] = built["lr"]  # as the job's schedule sets it
        with gradients_for_step(optimizer, skips_empty=skips_empty):
            optimizer.step()

    def keeps_gradients(self) -> bool:
        """Return whether the optimizer holds memory of the last step's gradients, which a strategy may overwrite."""
        gradients = {
            p.grad.untyped_storage().data_ptr() for p in self.weights if p.grad is not None and p.numel()
        }
        held = [tensor for one in self.named.inner() for tensor in tensors_in(vars(one.optimizer))]
        return any(t.layout == torch.strided and t.untyped_storage().data_ptr() in gradients for t in held)


def updates_parts_alike(job: NamedOptimizer, dims: Mapping[str, int]) -> bool:
    """Return whether an optimizer updates parts of tensors as it updates the whole tensors, in some steps on copies.

    It does if each element's update depends on the gradients of this element only, or of its whole tensors.

    Args:
        job: The job's optimizer.
        dims: The dimension along which each divided parameter is cut, by name.
    """
    places = {p: dims.get(name) for p, name in job.names.items() if p.requires_grad and not p.is_meta}
    shapes = {p: [min(n, SMALL) for n in p.shape] for p in places}
    for p, dim in places.items():
        if dim is not None and shapes[p]:
            shapes[p][min(dim, len(shapes[p]) - 1)] *= 2

    def part(p: Tensor, values: Tensor) -> Tensor:
        dim = places[p]
        return values if dim is None or not values.ndim else values.chunk(2, min(dim, values.ndim - 1))[0]

    return _updates_alike(job, shapes, part, alone=True)


def updates_pieces_alike(
    job: NamedOptimizer, shapes: Mapping[str, Sequence[int]], place: tuple[int, int], *, alone: bool
) -> bool:
    """Return whether an optimizer updates pieces of tensors as it updates the whole tensors, in some steps on copies.

    A piece is some rows of a tensor, or some of its elements as a vector. Random numbers are replaced by a constant,
    because pieces and whole tensors draw different ones.

    Args:
        job: The job's optimizer, which updates pieces.
        shapes: The shapes of the whole tensors, by name.
        place: Index of the piece to compare, and number of pieces.
        alone: Whether pieces are updated without functions that sum over ranks; if not, called by all these ranks.
    """
    index, number = place
    trained = {p: shapes[name] for p, name in job.names.items() if p.requires_grad and not p.is_meta}
    wholes = {p: [min(n, SMALL) for n in shape] or [1] for p, shape in trained.items()}
    for sizes in wholes.values():
        sizes[0] *= number

    def piece(p: Tensor, values: Tensor) -> Tensor:
        rows = values if p.ndim == len(trained[p]) else values.flatten()
        return rows.tensor_split(number)[index]

    return _updates_alike(job, wholes, piece, alone=alone, around_step=_ConstantDraws)


class _ConstantDraws(TorchDispatchMode):
    """Replaces the random numbers that PyTorch draws by a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            tree_map_only(Tensor, lambda each: each.fill_(0.5 if each.is_floating_point() else 1), results)
        return results


def _updates_alike(
    job: NamedOptimizer,
    shapes: Mapping[Tensor, Sequence[int]],
    part: Callable[[Tensor, Tensor], Tensor],
    *,
    alone: bool,
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> bool:
    """Compare the steps of an optimizer on tensors of the given shapes with its steps on a part of each."""
    numbers = torch.Generator().manual_seed(1)

    def drawn() -> dict[Tensor, Tensor]:
        return {p: torch.randn(shape, generator=numbers).to(p.device, p.dtype) for p, shape in shapes.items()}

    weights = drawn()
    whole = Trial._built(job, weights, alone=True)  # noqa: SLF001 - of this module
    parts = Trial._built(job, {p: part(p, values) for p, values in weights.items()}, alone=alone)  # noqa: SLF001
    for number, scale in enumerate(_SCALES):
        gradients = {p: scale * each for p, each in drawn().items()}
        for trial, given in (
            (whole, gradients),
            (parts, {p: part(p, each) for p, each in gradients.items()}),
        ):
            with around_step():
                trial.step_with([*given.values()], number)
    return all(
        torch.allclose(part(p, of_whole.detach()), of_part.detach(), rtol=_SAME, atol=_SAME)
        for p, of_whole, of_part in zip(weights, whole.weights, parts.weights, strict=True)
    )


def failure_text(error: Exception) -> str:
    """Return the type and the first line of an error in a user's code."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
