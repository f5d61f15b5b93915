"""Queue a study's seeds exactly once, even if several drivers start the study together or some are killed.

The driver that creates the study queues its seeds and marks the study as seeded. Other drivers wait for the mark before
they run anything; sessions that only read the study do not wait. If the queue stops growing before the mark is set, the
first driver is presumed dead, and another one continues from the first missing seed.

Every seed has a number, and the storage numbers trials in order. If several trials have the same seed number, the first
one counts, and the driver that queued a duplicate fails the duplicate and waits again. If that driver dies first,
the driver that starts the duplicate detects it (`recovery.over_budget`) and does not run it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from shardscope.spec.space import Space
from shardscope.tuning import storage
from shardscope.tuning.priors import Seed
from shardscope.tuning.records import NOT_COUNTED, ORIGIN, OVER_BUDGET, REASON, SEED, TrialWriter, to_study
from shardscope.tuning.recovery import TAKEN

_SEEDED = "seeded"
"""Attribute of a study whose seeds are all queued."""
_QUEUED_BY = "queued_by"
_POLL_S = 0.05


def queue_seeds(
    study: optuna.Study, writer: TrialWriter, seeds: Sequence[Seed], space: Space, *, is_creator: bool
) -> None:
    """Queue every seed in the study exactly once, or wait until another driver has done so.

    Args:
        study: A new study, or one that another driver created.
        writer: Writer of the study's trials.
        seeds: Seeds, the same in the same order for all drivers.
        space: The study's space.
        is_creator: Whether this driver created the study. Other drivers first wait for the creator.
    """
    is_mine = is_creator
    while not _is_seeded(study):
        if is_mine or not _is_waited_for(study):
            is_mine = _queue_missing(study, writer, seeds, space)


def _is_seeded(study: optuna.Study) -> bool:
    """Return whether the study is marked as seeded, or has sampled trials."""
    return _SEEDED in study.user_attrs or any(
        SEED not in trial.user_attrs and trial.state != TrialState.WAITING
        for trial in study.get_trials(deepcopy=False)
    )


def _is_waited_for(study: optuna.Study) -> bool:
    """Wait until another driver has queued all seeds; return False if it queues nothing for `STATED_WITHIN_S`."""
    seen, since = -1, time.monotonic()
    while not _is_seeded(study):
        count = len(study.get_trials(deepcopy=False))
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > storage.STATED_WITHIN_S:
            return False
        time.sleep(_POLL_S)
    return True


def _queue_missing(study: optuna.Study, writer: TrialWriter, seeds: Sequence[Seed], space: Space) -> bool:
    """Queue the missing seeds and mark the study; return False if another driver is found to be queueing them too."""
    me = uuid.uuid4().hex
    for number, seed in enumerate(seeds):
        if _of(study, number):
            continue
        attrs = {ORIGIN: seed.origin, SEED: number, _QUEUED_BY: me}
        study.enqueue_trial(to_study(seed.params, space), user_attrs=attrs)
        first, *others = _of(study, number)
        if first.user_attrs[_QUEUED_BY] != me:
            own = next(trial for trial in others if trial.user_attrs[_QUEUED_BY] == me)
            writer.end(own.number, TrialState.FAIL, None, {REASON: TAKEN, NOT_COUNTED: OVER_BUDGET})
            return False
    study.set_user_attr(_SEEDED, True)
    return True


def _of(study: optuna.Study, number: int) -> list[FrozenTrial]:
    """Return the trials queued for seed `number`, oldest first; all but the first are duplicates."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get(SEED) == number]
