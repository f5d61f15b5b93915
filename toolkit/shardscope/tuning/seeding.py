"""Putting a study's seeds into its queue, once, however many drivers begin it together and whoever is killed.

The driver that made the study queues its seeds and says when it is done; the others wait for that before they run
anything, and who only looks at the study does not wait. If the queue stops
growing before, that driver is gone, and another goes on with the first seed that is missing. Every seed has its number
in the study, and the storage numbers trials one after another: of several that carry the same seed the first counts,
and whoever queued a later one takes it back and waits again. Should it die before that, whoever begins the later one
finds that it is surplus (`recovery.surplus`), at the cost of no run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.spec.space import Space
from shardscope.tuning import storage
from shardscope.tuning.priors import ORIGINS, Seed
from shardscope.tuning.records import NOT_COUNTED, ORIGIN, REASON, SEED, Ledger, to_study
from shardscope.tuning.recovery import SURPLUS, TAKEN

_SEEDED = "seeded"
"""The study's attribute that says that its seeds are all in its queue."""
_BY = "queued_by"
_LOOK_EVERY_S = 0.05


def queue_seeds(
    study: optuna.Study, ledger: Ledger, seeds: Sequence[Seed], space: Space, *, is_maker: bool
) -> None:
    """Return once all seeds are in the study's queue, each of them once.

    Args:
        study: New, or begun by another driver.
        ledger: Of its trials.
        seeds: The same and in the same order for all its drivers.
        space: Of the study.
        is_maker: Whether this driver made the study. Others give it time.
    """
    is_mine = is_maker
    while not _is_seeded(study):
        if is_mine or not _is_waited_for(study):
            is_mine = _queue_missing(study, ledger, seeds, space)


def _is_seeded(study: optuna.Study) -> bool:
    """Whether it says so, or has begun to draw, or was begun when seeds had no numbers."""
    return _SEEDED in study.user_attrs or any(
        SEED not in trial.user_attrs
        and (trial.state != TrialState.WAITING or trial.user_attrs.get(ORIGIN) in ORIGINS)
        for trial in study.get_trials(deepcopy=False)
    )


def _is_waited_for(study: optuna.Study) -> bool:
    """Whether somebody has finished; False once nothing was queued for longer than a living driver takes."""
    seen, since = -1, time.monotonic()
    while not _is_seeded(study):
        count = len(study.get_trials(deepcopy=False))
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > storage.STATED_WITHIN_S:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _queue_missing(study: optuna.Study, ledger: Ledger, seeds: Sequence[Seed], space: Space) -> bool:
    """Queue what is not there yet, and say so; False as soon as another is found to do the same."""
    me = uuid.uuid4().hex
    for number, seed in enumerate(seeds):
        if _of(study, number):
            continue
        attrs = {ORIGIN: seed.origin, SEED: number, _BY: me}
        study.enqueue_trial(to_study(seed.params, space), user_attrs=attrs)
        first, *others = _of(study, number)
        if first.user_attrs[_BY] != me:
            own = next(trial for trial in others if trial.user_attrs[_BY] == me)
            ledger.end(own.number, TrialState.FAIL, None, {REASON: TAKEN, NOT_COUNTED: SURPLUS})
            return False
    study.set_user_attr(_SEEDED, True)
    return True


def _of(study: optuna.Study, number: int) -> list[FrozenTrial]:
    """The trials that carry a seed, the first of which counts."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get(SEED) == number]
