"""Parameter importances, fitted in a background thread because the first fit imports large modules."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import optuna

from shardscope.tuning.records import from_study
from shardscope.tuning.session import StudySession
from shardscope_widgets.figures._importances import ImportancesInfo, importances_info, trials_needed
from shardscope_widgets.figures._trials import TrialInfo
from shardscope_widgets.kit.background import Background


class ImportancesFit(Background):
    """The newest fit of the importances (`info`); `want` starts another fit if its inputs have changed."""

    def __init__(self) -> None:
        self.info: ImportancesInfo | None = None
        self._asked: tuple[str, int] | None = None

    def want(self, session: StudySession, trials: Sequence[TrialInfo], objective: str) -> None:
        """Request importances for an objective from the complete trials; return at once."""
        values = {
            t.number: t.values[objective] for t in trials if t.state == "complete" and objective in t.values
        }
        asked = (objective, len(values))
        if asked == self._asked or self._is_busy:
            return
        self._asked = asked
        needed = trials_needed(len(session.definition.space.parameters))
        if len(values) < needed:
            self.info = importances_info({}, objective=objective, trials=len(values), needed=needed)
            return
        self._start(self._work, session, values, objective, name="fit")

    def _work(self, session: StudySession, values: Mapping[int, float], objective: str) -> None:
        self.info = importances_info(fitted(session, values), objective=objective, trials=len(values))


def fitted(session: StudySession, values: Mapping[int, float]) -> dict[str, float]:
    """Return the parameter importances that Optuna computes, by name of the setting in the search space.

    Args:
        session: Session of the study.
        values: Value of the objective by trial number; other trials are ignored.
    """
    space = session.definition.space
    known = [trial for trial in session.study.get_trials(deepcopy=False) if trial.number in values]
    storage = optuna.storages.InMemoryStorage()
    storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], "fit")
    study = optuna.load_study(study_name="fit", storage=storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns that it treats low values as the target
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params=t.params, distributions=t.distributions, value=values[t.number]
                )
                for t in known
            ]
        )
        shares = optuna.importance.get_param_importances(study)
    return {next(iter(from_study({held: 0}, space)), held): share for held, share in shares.items()}
