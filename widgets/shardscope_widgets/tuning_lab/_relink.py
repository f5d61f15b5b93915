"""Predict the times of finished trials on another network link without new runs, with a cache of the runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardscope.errors import ShardscopeError
from shardscope.measure.projection import Projector
from shardscope.runtime.record.run import Run
from shardscope.spec import Link
from shardscope_widgets.figures._trials import TrialInfo, with_front

PENDING = "its time on this link is being computed"
UNFINISHED = "it has not ended yet"
_FINISHED = ("complete", "pruned")


def relinked(
    trials: Sequence[TrialInfo], objectives: Collection[str], step_on_link: Callable[[TrialInfo], float | str]
) -> list[TrialInfo]:
    """Return the trials with their predicted times on another link, and with the resulting front.

    Args:
        trials: Trials as measured.
        objectives: Objectives of the study, for the front.
        step_on_link: Function that returns the step time of a trial on the link in seconds, or why it is unknown.
    """
    return with_front([_moved(trial, step_on_link) for trial in trials], objectives)


def _moved(trial: TrialInfo, step_on_link: Callable[[TrialInfo], float | str]) -> TrialInfo:
    if "seconds" not in trial.values:
        return trial
    told = step_on_link(trial) if trial.state in _FINISHED else UNFINISHED
    rest = {name: value for name, value in trial.values.items() if name != "seconds"}
    if isinstance(told, str):
        return replace(trial, values=rest, note=told)
    return replace(trial, values={**rest, "seconds": told * trial.steps})


class Relinker:
    """Predicts the step times that a study's runs would have on other network links.

    Each run is read once and simulated once for all links of a grid. The prediction for a link of the grid is then a
    look-up; for any other link it costs about as much as for the whole grid.

    Args:
        links: Links whose bandwidths and latencies, in all combinations, form the grid.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._bandwidths = sorted({link.bandwidth for link in links})
        self._latencies = sorted({link.latency_s for link in links})
        self._read: dict[int, Known | str] = {}

    def read_ahead(self, trials: Sequence[TrialInfo], *, budget_s: float) -> bool:
        """Read finished trials for up to `budget_s` seconds; return True if all have been read."""
        deadline = time.monotonic() + budget_s
        for trial in trials:
            if trial.state in _FINISHED and trial.number not in self._read:
                if time.monotonic() > deadline:
                    return False
                self._read[trial.number] = self._played(trial)
        return True

    def onto(
        self, trials: Sequence[TrialInfo], objectives: Collection[str], link: Link, *, budget_s: float = 60.0
    ) -> list[TrialInfo]:
        """Return the trials with the times predicted for `link`.

        Trials that could not be read within `budget_s` seconds have the note `PENDING`.
        """
        self.read_ahead(trials, budget_s=budget_s)

        def step(trial: TrialInfo) -> float | str:
            known = self._read.get(trial.number, PENDING)
            return known if isinstance(known, str) else self._step(known, link)

        return relinked(trials, objectives, step)

    def _step(self, known: Known, link: Link) -> float:
        if link.bandwidth in self._bandwidths and link.latency_s in self._latencies:
            place = self._bandwidths.index(link.bandwidth), self._latencies.index(link.latency_s)
            return float(known.table[place])
        return known.projector.on(link).step_s

    def _played(self, trial: TrialInfo) -> Known | str:
        if trial.run is None or not Path(trial.run).is_dir():
            return "its run directory is not on this machine"
        try:
            projector = Projector(Run.attach(trial.run))
        except ShardscopeError as error:
            return str(error)
        table = projector.step_on(np.array(self._bandwidths)[:, None], np.array(self._latencies)[None, :])
        return Known(projector, table)


class Known(NamedTuple):
    """One run, and its step time in seconds on every link of the grid (bandwidth by latency)."""

    projector: Projector
    table: NDArray[np.float64]


def notes_of(trials: Sequence[TrialInfo]) -> dict[str, list[int]]:
    """Return the numbers of the trials that have no predicted time, by reason."""
    found: dict[str, list[int]] = {}
    for trial in trials:
        if trial.note:
            found.setdefault(trial.note, []).append(trial.number)
    return found
