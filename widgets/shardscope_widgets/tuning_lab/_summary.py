"""Static summary of a study, shown under the lab: a table and text that remain in a saved or exported notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardscope.show import Table
from shardscope.tuning.front import note_of
from shardscope.tuning.report import StudyReport, report_of
from shardscope_widgets.figures._trials import TrialInfo, objective_text, settings_of
from shardscope_widgets.kit.markup import words_html
from shardscope_widgets.tuning_lab import _words
from shardscope_widgets.tuning_lab._study import Shown

AT_MOST_EVERY_S = 3.0
_ROWS = 12
_ENDED = ("complete", "pruned", "failed", "impossible")


class StudySummary:
    """Summary of the study in the notebook, updated every few seconds while the study is running."""

    def __init__(self) -> None:
        self.html = ""
        self._told: object = None
        self._told_at = 0.0

    def forget(self) -> None:
        """Remove the summary of a study that is no longer shown."""
        self._told, self._told_at = None, 0.0
        self.html = ""

    def tell(self, shown: Shown, trials: Sequence[TrialInfo], wanted: int, *, is_running: bool) -> None:
        """Update the summary if a trial has ended or the state has changed, at most every few seconds during a run.

        Args:
            shown: The study.
            trials: Its trials.
            wanted: Total number of trials requested.
            is_running: Whether this kernel is running trials.
        """
        name, definition = shown.session.study.study_name, shown.session.definition
        ended = tuple((t.number, t.state, t.is_pinned) for t in trials if t.state in _ENDED)
        asked = (name, wanted, is_running, ended)
        if asked == self._told or (is_running and time.monotonic() - self._told_at < AT_MOST_EVERY_S):
            return
        self._told, self._told_at = asked, time.monotonic()
        report = report_of(name, list(shown.records.values()), definition)
        status = _words.status_text(name, trials, wanted, "running" if is_running else "idle")
        self.html = summary_html(trials, definition.objectives, report, status)


def summary_html(
    trials: Sequence[TrialInfo], objectives: Sequence[str], report: StudyReport, status: str
) -> str:
    """Return the status, the trials on the front with their settings, and the verdict; empty without trials."""
    if not trials:
        return ""
    front = sorted(
        (trial for trial in trials if trial.is_front), key=lambda trial: trial.values[objectives[0]]
    )
    words = [report.verdict] if front else []
    if len(front) > _ROWS:
        words.append(f"{len(front) - _ROWS} more trials are on the front.")
    note = note_of(report.by_noise)
    if note is not None:
        words.append(note)
    words.append(f'TuningLab(name="{report.name}") opens the study.')
    table = _table(front[:_ROWS], objectives) if front else ""
    return f"{words_html(status)}{table}{words_html(' '.join(words))}"


def _table(front: Sequence[TrialInfo], objectives: Sequence[str]) -> str:
    names = list(dict.fromkeys(name for trial in front for name in settings_of(trial)))
    rows = [
        [
            f"trial\u00a0{trial.number}{' ★' * trial.is_pinned}",
            *(objective_text(name, trial.values[name]) for name in objectives),
            *(settings_of(trial).get(name, "") for name in names),
        ]
        for trial in front
    ]
    return Table(("on the front", *objectives, *names), rows).html("ss-table")
