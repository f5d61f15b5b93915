"""Tries out a user's optimizer before the first step, rejects it if it would train or resume incorrectly, and
prepares it.

All ranks try it on copies of their parameters and agree on the result, because a rank that fails in a step would leave
the other ranks waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from shardscope.errors import SpecError
from shardscope.spec import Job
from shardscope.training.collectives.process_group import Call
from shardscope.training.optim.state import NamedOptimizer
from shardscope.training.optim.trial import (
    SMALL,
    Trial,
    failure_text,
    updates_parts_alike,
    updates_pieces_alike,
)
from shardscope.training.optim.user_defined import empty_pieces, gradients_for_step, random_numbers_of
from shardscope.training.saved_state import saves_state
from shardscope.training.strategies.base import RankStrategy

_MOST_ELEMENTS = 1 << 22
"""Maximum total size, in elements, at which a trial copies parameters at full size."""
_NUM_STEPS = 2
"""Number of trial steps in which an optimizer's use of gradients and its collectives are observed."""


def prepare_user_optimizer(job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer) -> None:
    """Try out a user's optimizer on copies, and prepare its steps: seed random numbers, and adapt the gradients.

    Called by all ranks. Ranks that update the same parameters draw the same random numbers in a step. Empty shards of
    parameters are skipped only if the optimizer cannot update them, and gradients are copied only if it keeps them.

    Raises:
        SpecError: The optimizer cannot train with the strategy, or cannot be resumed from the state that the job saves.
    """
    named = strategy.named_optimizer(optimizer)
    if strategy.all_ranks.world_size > 1 and strategy.shares_state and named is not None:
        copies = _keeps_gradients(job, strategy, named)
        skips = strategy.holding.is_split and _needs_to_skip(job, strategy, named)
        if skips:
            for piece in empty_pieces(optimizer):  # a run that resumes has loaded that of other ranks
                optimizer.state.pop(piece, None)
        strategy.precision.around_step = partial(_around, job, strategy, skips=skips, copies=copies)
    split = strategy.tensor_split
    if split is not None:  # after refusing collectives of its own between different parts
        dims = {name: cut.dim for name, cut in split.cuts.items()}
        found = _unlike_whole(strategy, named, partial(updates_parts_alike, dims=dims))
        if found is not None:
            raise SpecError(
                f"optimizer={job.optimizer.name!r} cannot train with tensor={split.axis.size}, where ranks hold parts "
                f"of tensors: {found}; use an element-wise rule, one of shardscope's optimizers, or tensor=1"
            )
    if strategy.holding.is_split:
        _require_for_pieces(job, strategy, named)
    if saves_state(job):
        _require_resumable(job, strategy, named)


def _require_for_pieces(job: Job, strategy: RankStrategy, named: NamedOptimizer | None) -> None:
    """Reject an optimizer that updates pieces of tensors differently than whole tensors, as with unsummed norms."""
    is_alone = strategy.tensor_split is not None  # with which only rules without sums over ranks are accepted
    place = (0, 2) if is_alone else _place_among_pieces(strategy)
    found = _unlike_whole(
        strategy, named,
        lambda each: updates_pieces_alike(
            each, {n: strategy.holding.shape(n, p) for n, p in each.parameters.items()}, place, alone=is_alone
        ),
    )  # fmt: skip
    if found is not None:
        raise SpecError(
            f"optimizer={job.optimizer.name!r} cannot train with strategy={job.strategy.label!r}, whose ranks hold "
            f"pieces of tensors: {found}; use an element-wise rule, sum squared norms over ranks with the parameters' "
            "reduce_squares, or use 'all-reduce', 'ring', 'tree' or 'hierarchical', whose ranks hold whole tensors"
        )


def _place_among_pieces(strategy: RankStrategy) -> tuple[int, int]:
    """Return this rank's index among the ranks over which norms are summed, and their number; called by all ranks."""
    ranks, reduce_squares = strategy.all_ranks, strategy.reduce_squares
    assert reduce_squares is not None
    found = torch.zeros(ranks.world_size, dtype=torch.float64, device=ranks.device)
    found[ranks.rank] = 1
    members = reduce_squares(found).nonzero().flatten().tolist()
    return members.index(ranks.rank), len(members)


def _unlike_whole(
    strategy: RankStrategy, named: NamedOptimizer | None, updates_alike: Callable[[NamedOptimizer], bool]
) -> str | None:
    """Return how an optimizer on any rank fails a trial of its steps on parts of tensors; called by all ranks."""
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users

    problem = None
    if named is not None:
        with random_numbers_of(lambda: [0], strategy.context.device):
            try:
                if not updates_alike(named):
                    problem = "it updates a part of a tensor differently than the whole tensor"
            except Exception as error:  # noqa: BLE001 - anything in the user's code
                problem = f"it fails on copies of the parameters ({failure_text(error)})"
    return next((each for each in gather_items(strategy.all_ranks, problem) if each), None)


@contextmanager
def _around(
    job: Job, strategy: RankStrategy, optimizer: torch.optim.Optimizer, *, skips: bool, copies: bool
) -> Iterator[None]:
    """Return a context manager around a step of the optimizer, which seeds random numbers and adapts gradients."""
    step = strategy.context.meter.step
    with random_numbers_of(lambda: [job.seed, step, strategy.part_number], strategy.context.device):
        is_changed = skips or copies
        with gradients_for_step(optimizer, skips_empty=skips, copies=copies) if is_changed else nullcontext():
            yield


@dataclass(frozen=True)
class _Steps:
    """Behaviour of an optimizer in its first steps on one rank.

    Attributes:
        calls: Collectives and messages that the optimizer called itself.
        with_parameters: Name of the first of these calls with a tensor of a parameter's size; None if there is none.
        keeps_gradients: Whether the optimizer keeps gradients.
        failed: Whether a step failed, perhaps because pieces are empty or the copies are small.
    """

    calls: tuple[Call, ...] = ()
    with_parameters: str | None = None
    keeps_gradients: bool = False
    failed: bool = False


def _keeps_gradients(job: Job, strategy: RankStrategy, named: NamedOptimizer) -> bool:
    """Return whether the optimizer keeps gradients on any rank; reject one that combines unrelated parameters."""
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users

    is_whole = strategy.tensor_split is None
    are_same = len({*gather_items(strategy.all_ranks, strategy.part_number)}) == 1 and is_whole
    for skips in (False, True):
        every = gather_items(
            strategy.all_ranks, _first_steps(strategy, named, are_same=are_same, skips=skips)
        )
        if not any(each.failed for each in every):
            break
    call = next((each.with_parameters for each in every if each.with_parameters), None)
    if call is None and len({each.calls for each in every}) > 1 and not any(each.failed for each in every):
        call = next(name for each in every for name, _ in each.calls)
    if call is not None and not are_same:
        raise SpecError(
            f"optimizer={job.optimizer.name!r} cannot train with strategy={job.strategy.label!r}, whose ranks update "
            f"different parameters: its steps combine them with torch.distributed ({call}); try strategy='ring', whose "
            "ranks update the same parameters"
        )
    return any(each.keeps_gradients for each in every)


def _first_steps(strategy: RankStrategy, named: NamedOptimizer, *, are_same: bool, skips: bool) -> _Steps:
    """Take some steps on copies; collectives of the optimizer itself run only if ranks have the same parameters."""
    group, keeps, failed = strategy.all_ranks.group, False, False
    sizes = set[int]()
    assert group is not None
    with (
        random_numbers_of(lambda: [0], strategy.context.device),
        nullcontext(list[Call]()) if are_same else group.recording_calls() as calls,
    ):
        try:
            tried = Trial.of(named, largest=SMALL if are_same else _largest(named))
            sizes = {p.numel() for p in tried.weights if p.numel() > 1}
            for number in range(_NUM_STEPS):
                tried.step(number, skips_empty=skips)
                keeps = keeps or tried.keeps_gradients()
        except Exception:  # noqa: BLE001 - anything in the user's code
            failed = True
    with_parameters = next((name for name, elements in calls if sizes & {*elements}), None)
    return _Steps(tuple(calls), with_parameters, keeps, failed)


def _needs_to_skip(job: Job, strategy: RankStrategy, named: NamedOptimizer) -> bool:
    """Return whether, on any rank, the optimizer can step only if it skips empty pieces."""
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users

    def told(*, skips: bool) -> list[str | None]:
        return gather_items(strategy.all_ranks, _failure(strategy, named, skips=skips))

    if not any(told(skips=False)):
        return False
    failures = told(skips=True)
    rank = next((number for number, text in enumerate(failures) if text), None)
    if rank is None:
        return True
    if any(gather_items(strategy.all_ranks, _largest(named) is not None)):
        return False  # the smaller copies may be the cause
    raise SpecError(
        f"optimizer={job.optimizer.name!r} cannot train with strategy={strategy.name!r}, which gives rank {rank} "
        f"pieces of parameters: its first step fails with {failures[rank]}; try strategy='ring', whose ranks update "
        "whole parameters"
    )


def _largest(named: NamedOptimizer) -> int | None:
    """Return the maximum size of a dimension of the copies; None for copies at full size."""
    return None if sum(p.numel() for p in named.parameters.values()) <= _MOST_ELEMENTS else SMALL


def _failure(strategy: RankStrategy, named: NamedOptimizer, *, skips: bool) -> str | None:
    """Return the error of a step on copies of this rank's pieces, as text; None if the step succeeds."""
    with random_numbers_of(lambda: [0], strategy.context.device):
        try:
            tried = Trial.of(named, largest=_largest(named), alone=False)
        except Exception:  # noqa: BLE001 - a user's build may take only the job's own parameters
            return None
        try:
            tried.step(0, skips_empty=skips)
        except Exception as error:  # noqa: BLE001 - anything in the user's code
            return failure_text(error)
    return None


def _require_resumable(job: Job, strategy: RankStrategy, named: NamedOptimizer | None) -> None:
    from shardscope.training.checkpoint.agreement import gather_items  # only for optimizers of users
    from shardscope.training.checkpoint.rehearsal import Rehearsed, rehearsed

    is_split = strategy.holding.is_split or strategy.tensor_split is not None
    told = Rehearsed()
    if named is not None:
        trained = sum(p.requires_grad for p in strategy.model.parameters())
        is_divided = is_split or len(named.parameters) < trained
        told = rehearsed(named, is_split=is_split, is_resized=is_divided and job.elastic is not None)
    every = gather_items(strategy.all_ranks, told)  # ranks may have other parameters or pieces
    problem = next((each.problem for each in every if each.problem), None)
    if problem is not None:
        raise SpecError(
            f"optimizer={job.optimizer.name!r} cannot be resumed: {problem}; keep its state in optimizer.state or in "
            "param_groups"
        )
    if told.untried is not None:
        strategy.all_ranks.events.emit(
            "optimizer_note", step=0,
            text=f"optimizer={job.optimizer.name!r} was not tried before the first step, because it fails on small "
            f"copies of the parameters ({told.untried}), so a resumed run may train differently",
        )  # fmt: skip
