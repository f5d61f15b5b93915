"""The study that a lab shows: whether there is one of this name, its trials, and what each is to take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

from shardscope.errors import SpecError
from shardscope.runtime.rundir import runs_root
from shardscope.tuning.apply import apply
from shardscope.tuning.measured import Measured
from shardscope.tuning.records import TrialRecord
from shardscope.tuning.session import Session
from shardscope.tuning.storage import open_storage
from shardscope_widgets.figures._trials import TrialInfo, trials_info


def is_there(name: str, storage: Any, root: Path | None) -> bool:
    """Whether a study of this name has been begun; looking leaves nothing behind."""
    if storage is None and not (runs_root(root) / "studies" / name / "journal.log").is_file():
        return False
    return name in optuna.get_all_study_names(open_storage(storage, name, root))


class Shown:
    """A session, read again and again."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._steps: dict[int, int] = {}
        self.records: dict[int, TrialRecord] = {}

    def trials(self, live: Mapping[int, Measured]) -> list[TrialInfo]:
        """All trials by now."""
        found = self.session.records()
        self.records = {record.number: record for record in found}
        objectives = self.session.definition.objectives
        return trials_info(found, objectives, steps_of=self._steps_of, live=live)

    def _steps_of(self, record: TrialRecord) -> int:
        if record.number not in self._steps or record.state == "waiting":
            self._steps[record.number] = self._worked_out(record)
        return self._steps[record.number]

    def _worked_out(self, record: TrialRecord) -> int:
        definition = self.session.definition
        try:
            return apply(definition.job, record.params, equal=definition.equal).steps
        except SpecError:
            return definition.job.steps  # it was impossible, and takes none
