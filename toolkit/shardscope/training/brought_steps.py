"""Tries the first step of an optimizer that a user brings, to refuse one that cannot update pieces of parameters.

Ranks that fail in a step leave the others waiting, so all ranks try the step on copies before training, and agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.training.optim.brought import empty_pieces, random_numbers_of, without_empty_gradients
from shardscope.training.optim.state import built_again
from shardscope.training.strategies.base import RankStrategy

_MOST_ELEMENTS, _LARGEST = 1 << 22, 5
"""Largest number of elements that are copied as they are; of more, only some in each dimension."""


def prepare_steps(job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> None:
    """Make a user's optimizer draw the same random numbers on ranks that take the same steps, and skip empty pieces.

    Empty pieces of parameters are skipped only if the optimizer cannot update them. Called by all ranks.

    Raises:
        SpecError: The optimizer cannot update the pieces of parameters of some rank.
    """
    if strategy.context.world_size == 1 or not strategy.shares_state:
        return
    skips = strategy.holding.is_split and _needs_to_skip(job, strategy, optimizer)
    if skips:
        for piece in empty_pieces(optimizer):  # a run that resumes has loaded that of other ranks
            optimizer.state.pop(piece, None)
    strategy.precision.around_step = partial(_around, job, strategy, skips=skips)


@contextmanager
def _around(
    job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer, *, skips: bool
) -> Iterator[None]:
    """Surround a step of the optimizer."""
    step = strategy.context.meter.step
    with random_numbers_of(lambda: [job.seed, step, strategy.part_number], strategy.context.device):
        if not skips:
            yield
            return
        with without_empty_gradients(optimizer):
            yield


def _needs_to_skip(job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can step only if it skips empty pieces, on some rank."""
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users

    def told(*, skips: bool) -> list[str | None]:
        return gather_items(strategy.context, _failure(strategy, optimizer, skips=skips))

    if not any(told(skips=False)):
        return False
    failures = told(skips=True)
    rank = next((number for number, text in enumerate(failures) if text), None)
    if rank is None:
        return True
    if any(gather_items(strategy.context, _num_elements(optimizer) > _MOST_ELEMENTS)):
        return False  # the smaller copies may be the cause
    raise SpecError(
        f"optimizer={job.optimizer.name!r} cannot train with strategy={strategy.name!r}, which gives rank {rank} "
        f"pieces of parameters: its first step fails with {failures[rank]}; try strategy='ring', whose ranks update "
        "whole parameters"
    )


def _num_elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def _failure(strategy: RankStrategy, optimizer: torch.optim.Optimizer, *, skips: bool) -> str | None:
    """Return how a step on copies of this rank's pieces fails; None if it does not."""
    is_small = _num_elements(optimizer) <= _MOST_ELEMENTS
    held = [p for group in optimizer.param_groups for p in group["params"]]
    copies = {p: nn.Parameter(_copied(p, is_small=is_small)) for p in held}
    with random_numbers_of(lambda: [0], strategy.context.device):
        try:
            tried = built_again(optimizer, copies)
        except Exception:  # noqa: BLE001 - a user's build may take only the job's own parameters
            return None
        for each in copies.values():
            each.grad = torch.randn_like(each) / 100
        try:
            if skips:
                with without_empty_gradients(tried):
                    tried.step()
            else:
                tried.step()
        except Exception as error:  # noqa: BLE001 - anything in the user's code
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return None


def _copied(piece: Tensor, *, is_small: bool) -> Tensor:
    copy = piece.detach()
    for dim in range(0 if is_small else piece.dim()):
        copy = copy.narrow(dim, 0, min(piece.shape[dim], _LARGEST))
    return copy.clone()
