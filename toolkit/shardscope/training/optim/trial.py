"""Trial of a user's optimizer on copies of the job's parameters, to examine its steps and state before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardscope.training.optim.state import NamedOptimizer, built_again, tensors_in
from shardscope.training.optim.user_defined import gradients_for_step
from shardscope.training.random_state import seed_everything

SMALL = 5
"""Largest number of elements in a dimension of small copies."""


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
        seed_everything(1000 * seed + number)
        numbers = torch.Generator().manual_seed(1000 * seed + number)
        for parameter in self.weights:
            grad = torch.randn(parameter.shape, generator=numbers)
            parameter.grad = grad.to(parameter.device, parameter.dtype)
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


def failure_text(error: Exception) -> str:
    """Return the type and the first line of an error in a user's code."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
