"""Deletion of checkpoints that no trial will resume from any more.

A trial that is trained in pieces leaves a checkpoint at each rung that it reaches. It resumes from the last one, so the
earlier ones are not needed. The last one is no longer needed once the trial has been pruned, or has failed without a
successor. All of this follows from the study's records, so any driver can delete checkpoints at any time; if it is
killed, the next driver deletes the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from shardscope.runtime.record.rundir import this_host
from shardscope.tuning.pruning.halving import Paused
from shardscope.tuning.records import DRIVER, RETRY_OF, RUN, not_counted
from shardscope.tuning.recovery import LOST, is_among, successors


def unneeded(trials: Sequence[FrozenTrial]) -> set[str]:
    """Return the paths of the runs on this machine whose checkpoints no trial of the study will need any more."""
    heirs = successors(list(trials))
    found: set[str] = set()
    needed: set[str] = set()
    for trial in trials:
        found.update(_pieces(trial))
        if trial.state == TrialState.COMPLETE:
            needed.add(trial.user_attrs.get(RUN, ""))  # its checkpoint is a result of the study
        elif not _has_ended(trial, heirs):
            needed.update(_resumable_runs(trial))
    return found - needed


def delete(run: str, folder: Path) -> None:
    """Delete the checkpoints of a run if it lies in `folder`, the driver's folder of trials; keep all other files."""
    if is_among(run, folder):
        shutil.rmtree(Path(run) / "checkpoints", ignore_errors=True)


def _pieces(trial: FrozenTrial) -> Iterator[str]:
    """Yield the paths of a trial's runs on this machine."""
    paused = Paused.of(trial.user_attrs)
    if paused is not None and paused.host == this_host():
        yield from paused.runs
    if (trial.user_attrs.get(DRIVER) or {}).get("host") == this_host() and RUN in trial.user_attrs:
        yield trial.user_attrs[RUN]


def _has_ended(trial: FrozenTrial, heirs: Mapping[int, list[int]]) -> bool:
    """Return whether the trial will never resume, under its own number or that of a successor."""
    if not trial.state.is_finished():
        return False
    earlier = trial.user_attrs.get(RETRY_OF)
    is_surplus = earlier is not None and heirs[earlier][0] != trial.number
    return not_counted(trial) != LOST or trial.number in heirs or is_surplus


def _resumable_runs(trial: FrozenTrial) -> Iterator[str]:
    """Yield the paths of the runs from which the trial may resume: that of its last complete rung, and the newest."""
    paused = Paused.of(trial.user_attrs)
    if paused is not None:
        yield paused.runs[-1]
    if RUN in trial.user_attrs:
        yield trial.user_attrs[RUN]
