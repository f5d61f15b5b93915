"""The study that a lab shows: lookup by name, its trials, and the planned steps of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from shardscope.errors import SpecError, StudyError
from shardscope.runtime.record.run import Run
from shardscope.tuning.apply import apply
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.records import NOT_BEGUN, TrialRecord
from shardscope.tuning.session import StudySession
from shardscope.tuning.storage import answering, definition_of, journal_of, open_storage, place_of
from shardscope_widgets.figures._trials import TrialInfo, trials_info


def reopened(name: str, storage: Any, root: Path | None, own: Mapping[str, Any]) -> StudySession | None:
    """Open the existing study with this name; if there is none, return None without creating anything.

    Placeholders replace user-defined objectives that are not in `own`, so that the study can at least be viewed;
    `missing` lists them.

    Raises:
        ShardscopeError: The storage does not respond, or the study was created by another program.
    """
    place = place_of(name, root)
    if storage is None and not journal_of(place).is_file():
        return None
    opened = open_storage(storage, name, root)
    with answering(name):
        if name not in optuna.get_all_study_names(opened):
            return None
        stored = definition_of(opened, name)
    functions = {each: own.get(each, _stand_in) if each in stored.own else None for each in stored.objectives}
    return StudySession.open(name=name, objectives=functions, storage=storage, root=root)


def _stand_in(run: Run) -> float:
    raise StudyError(f"run {run.id} has a user-defined objective; pass its function again")


def missing(session: StudySession | None, own: Mapping[str, Any]) -> str | None:
    """Return a sentence on the functions that must be passed again to resume the study; None if none is missing."""
    lacking = [name for name in session.definition.own if name not in own] if session is not None else []
    if session is None or not lacking:
        return None
    given = ", ".join(
        f"{name!r}: {name if name in lacking else None}" for name in session.definition.objectives
    )
    return (
        f"study {session.study.study_name!r} minimises {', '.join(lacking)} using your own function, which must be "
        f"passed again to continue: use objectives={{{given}}}"
    )


class Shown:
    """A session whose trials are read repeatedly, for display."""

    def __init__(self, session: StudySession) -> None:
        self.session = session
        self._steps: dict[tuple[int, int], int] = {}
        self.records: dict[int, TrialRecord] = {}

    def trials(self, live: Mapping[int, TrialMetrics]) -> list[TrialInfo]:
        """Return all trials so far."""
        found = self.session.records()
        self.records = {record.number: record for record in found}
        objectives = self.session.definition.objectives
        is_baseline = self.session.definition.is_baseline
        return trials_info(found, objectives, steps_of=self._steps_of, live=live, is_baseline=is_baseline)

    def _steps_of(self, record: TrialRecord) -> int:
        key = record.number, len(record.params)  # a trial begins before all its settings are suggested
        if key not in self._steps or record.state in NOT_BEGUN:
            self._steps[key] = self._worked_out(record)
        return self._steps[key]

    def _worked_out(self, record: TrialRecord) -> int:
        definition = self.session.definition
        try:
            return apply(definition.job, record.params, equal=definition.equal).steps
        except SpecError:
            return definition.job.steps  # the trial was impossible, so it takes no steps
