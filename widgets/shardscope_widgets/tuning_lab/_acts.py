"""Actions on a trial, for buttons and for code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.errors import StudyError
from shardscope.runtime.record.run import Run
from shardscope.spec import Job
from shardscope.tuning.records import AGAIN, ORIGIN, to_study
from shardscope.tuning.session import StudySession

if TYPE_CHECKING:
    from shardscope_widgets.figures._trials import TrialInfo
    from shardscope_widgets.kit.guard import Guard
    from shardscope_widgets.tuning_lab._engine import Engine
    from shardscope_widgets.tuning_lab._pictures import Pictures
    from shardscope_widgets.tuning_lab._screen import TuningScreen


class TrialActs:
    """Actions of the Tuning Lab on one trial.

    In every method, `number` is the number of the trial; None means the chosen trial. All methods raise `StudyError` if
    no trial is chosen.
    """

    if TYPE_CHECKING:
        name: str
        chosen: int
        trials: int
        applied: Job | None
        screen: TuningScreen
        pictures: Pictures
        _guard: Guard
        _engine: Engine
        _trials: list[TrialInfo]

        @property
        def session(self) -> StudySession | None: ...
        @property
        def is_running(self) -> bool: ...
        def start(self) -> None: ...
        def refresh(self) -> None: ...
        def _draw_run(self) -> None: ...

    def prune(self, number: int | None = None) -> None:
        """Stop a running trial and count it as pruned. A trial that ends on its own in the meantime keeps its
        result.

        Raises:
            StudyError: The trial is not running in this kernel.
        """
        which = self._number(number)
        if not self._engine.can_prune(which):
            raise StudyError(f"trial {which} is not running in this kernel, so it cannot be pruned")

        def act(session: StudySession) -> None:
            if session.driver.can_prune(which):
                with self._guard.run(lock=False):
                    session.driver.prune(which)

        self._engine.ask(act)

    def _prune_chosen(self) -> None:
        """Prune the chosen trial, as its button does; do nothing if the trial has just ended."""
        if self._engine.can_prune(self._number(None)):
            self.prune()

    def pin(self, number: int | None = None) -> None:
        """Pin a trial, or unpin it if it is pinned."""
        which = self._number(number)
        self._study().pin(which, not self._trial(which).is_pinned)
        self.refresh()

    def apply(self, number: int | None = None) -> Job:
        """Return the job of a trial, store it in `applied`, and show its code."""
        self.applied = self._study().job(self._number(number))
        self.screen.chosen.show_code(self.applied)
        return self.applied

    def again(self, number: int | None = None) -> None:
        """Run the settings of a trial again as an additional trial, and start the study if it is not running."""
        session, which = self._study(), self._number(number)
        params = to_study(session.record(which).params, session.definition.space)
        session.study.enqueue_trial(params, user_attrs={ORIGIN: AGAIN})
        self.trials += 1
        if not self.is_running:
            self.start()
        self.refresh()

    def open_run(self, number: int | None = None) -> Run:
        """Show the run of a trial as in the Training Lab, and return it."""
        which = self._number(number)
        run = self._study().trial_run(which)
        self.chosen = which
        self.pictures.open_run()
        self._draw_run()
        return run

    def _study(self) -> StudySession:
        if self.session is None:
            raise StudyError(f"study {self.name!r} does not exist yet; start it")
        return self.session

    def _number(self, number: int | None) -> int:
        which = self.chosen if number is None else number
        if which < 0:
            raise StudyError("no trial is chosen; click a point or a row")
        return which

    def _trial(self, number: int) -> TrialInfo:
        found = next((trial for trial in self._trials if trial.number == number), None)
        if found is None:
            raise StudyError(f"study {self.name!r} has no trial {number}")
        return found
