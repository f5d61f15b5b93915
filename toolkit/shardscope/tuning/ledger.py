"""Writing into a study's trials by their numbers, which works for trials that other processes began too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import TrialState


@dataclass
class Ledger:
    """The trials of one study in a storage."""

    storage: BaseStorage
    name: str
    _study: int | None = None
    _ids: dict[int, int] = field(default_factory=dict)

    def id_of(self, number: int) -> int:
        """What the storage calls a trial."""
        if number not in self._ids:
            if self._study is None:
                self._study = self.storage.get_study_id_from_name(self.name)
            self._ids[number] = self.storage.get_trial_id_from_study_id_trial_number(self._study, number)
        return self._ids[number]

    def take(self, number: int) -> int | None:
        """Begin a trial that waits, for this process alone: its id in the storage; None if another has begun it."""
        try:
            is_ours = self.storage.set_trial_state_values(self.id_of(number), TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return None
        return self.id_of(number) if is_ours else None

    def write(self, number: int, attrs: Mapping[str, Any]) -> bool:
        """Set attributes of a trial that has not ended; False for one that has, of which nothing is changed."""
        try:
            for name, value in attrs.items():
                self.storage.set_trial_user_attr(self.id_of(number), name, value)
        except UpdateFinishedTrialError:
            return False
        return True

    def end(
        self, number: int, state: TrialState, values: Sequence[float] | None, attrs: Mapping[str, Any]
    ) -> bool:
        """Write a trial's attributes and end it; False if it had ended before, which leaves it as it was.

        So after an outage between writing and hearing so, twice is as good as once, and of several processes that end
        a trial, one does.
        """
        self.write(number, attrs)
        try:
            return bool(self.storage.set_trial_state_values(self.id_of(number), state, values))
        except UpdateFinishedTrialError:
            return False
