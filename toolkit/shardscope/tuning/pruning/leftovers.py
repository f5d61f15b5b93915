"""Deletion of checkpoints that no trial resumes from any more.

A trial in pieces leaves a checkpoint at each rung that it reaches. It resumes from the last, so the earlier ones are
unneeded. The last is unneeded after the trial was pruned, or has failed without a successor. The study alone determines
which these are, so any driver can delete them at any time; if it is killed, the next one deletes the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from shardscope.runtime.rundir import this_host
from shardscope.tuning.pruning.halving import Paused
from shardscope.tuning.records import DRIVER, RETRY_OF, RUN, not_counted
from shardscope.tuning.recovery import LOST, is_among, successors


def unneeded(trials: Sequence[FrozenTrial]) -> set[str]:
    """Return the paths of the pieces on this machine whose checkpoints no trial of a study can still need."""
    heirs = successors(list(trials))
    found: set[str] = set()
    needed: set[str] = set()
    for trial in trials:
        found.update(_pieces(trial))
        if trial.state == TrialState.COMPLETE:
            needed.add(trial.user_attrs.get(RUN, ""))  # a result of the study
        elif not _has_ended(trial, heirs):
            needed.update(_goes_on_from(trial))
    return found - needed


def delete(run: str, folder: Path) -> None:
    """Delete the checkpoints of a run if it lies in the driver's folder of trials; all other files stay."""
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
    """Return whether the trial will never resume, under its own number or a successor's."""
    if not trial.state.is_finished():
        return False
    earlier = trial.user_attrs.get(RETRY_OF)
    is_surplus = earlier is not None and heirs[earlier][0] != trial.number
    return not_counted(trial) != LOST or trial.number in heirs or is_surplus


def _goes_on_from(trial: FrozenTrial) -> Iterator[str]:
    """Yield the trial's last whole piece, and its newest run, which may become the last piece."""
    paused = Paused.of(trial.user_attrs)
    if paused is not None:
        yield paused.runs[-1]
    if RUN in trial.user_attrs:
        yield trial.user_attrs[RUN]
