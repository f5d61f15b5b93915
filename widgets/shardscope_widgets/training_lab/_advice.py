"""The live explanation of the run in focus: its largest loss of time, and a button that starts the changed job.

For a run that was started by that button, a verdict comes first: whether the change helped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.training_lab._words import LEAST_STEPS
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.measure.explain.of_run import Explanation
    from shardscope.measure.explain.verdict import Verdict
    from shardscope.runlog.tail import Event
    from shardscope.runtime import Run

AGAIN_AFTER_S = 3.0
"""Seconds after which the explanation of a running run is computed again; longer if it takes long."""
_PATIENCE = 10
_KEPT_STEPS = 400
"""Number of newest steps from whose events a run is explained."""


class AdvicePanel:
    """Sentences on the run in focus, and a button to run the change that they suggest.

    Explanations are computed in a separate thread, and not before `begin` is called, because the lab is not displayed
    before that.

    Args:
        on_try: Called with the changes to the job when the button is pressed.
    """

    def __init__(self, on_try: Callable[[Run, Mapping[str, Any]], None]) -> None:
        self.line = widgets.HTML()
        self.button = widgets.Button(description="Run it", icon="play")
        self.button.tooltip = "Fill the form with this change, and start a run of it, once this run has ended"
        self.box = classed(widgets.HBox([self.line, self.button]), "ss-advice")
        self.found: Explanation | None = None
        self._on_try = on_try
        self._run: Run | None = None
        self._known = (0, False)
        self._due_at = 0.0
        self._begun = False
        self._thread: threading.Thread | None = None
        self._tail: Any = None
        self._tail_of: Run | None = None
        self._events: list[Event] = []
        self.button.on_click(lambda _button: self.try_it())
        self._show(None)

    def begin(self) -> None:
        """Start explaining; call this when the lab is displayed."""
        self._begun = True

    def want(self, run: Run | None, num_steps: int, *, is_alive: bool, baseline: Run | None = None) -> None:
        """Request an explanation of `run` and return at once; None clears the last one.

        Args:
            run: The run in focus.
            num_steps: Number of its finished steps.
            is_alive: Whether it is still running.
            baseline: The run whose suggested change `run` tries; None if there is none.
        """
        if (run and run.id) != (self._run and self._run.id):
            self._run, self._known, self._due_at = run, (0, False), 0.0
            self._show(None)
        is_busy = self._thread is not None and self._thread.is_alive()
        is_new = self._known != (num_steps, is_alive) and (time.monotonic() >= self._due_at or not is_alive)
        if run is None or not self._begun or is_busy or not is_new or num_steps < LEAST_STEPS:
            return
        self._known = (num_steps, is_alive)
        self._thread = threading.Thread(
            target=self._work, args=(run, baseline, is_alive), name="shardscope-advice", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the explanation that is being computed; None waits without limit."""
        if self._thread is not None:
            self._thread.join(timeout)

    def try_it(self) -> None:
        """Pass on the suggested change, as the button does."""
        if self._run is not None and self.found is not None and self.found.change is not None:
            self._on_try(self._run, self.found.change)

    def _work(self, run: Run, baseline: Run | None, is_alive: bool) -> None:
        from shardscope.measure.explain.of_run import explain_events
        from shardscope.measure.explain.verdict import verdict

        started = time.monotonic()
        found, told, problem = None, None, ""
        try:
            found = explain_events(run, self._newest_events(run))
            told = None if baseline is None else verdict(run, baseline)
        except ShardscopeError:  # no step with spans yet, or a run that can no longer be read
            pass
        except Exception as error:  # noqa: BLE001 - nobody sees an error of a thread
            problem = f"The run cannot be explained: {type(error).__name__}: {error}"
        if self._run is not None and run.id == self._run.id:
            self._due_at = time.monotonic() + max(AGAIN_AFTER_S, _PATIENCE * (time.monotonic() - started))
            self._show(found, told, problem, is_alive=is_alive)

    def _newest_events(self, run: Run) -> list[Event]:
        """Return the events of the newest steps: a long run has too many to keep all."""
        if self._tail is None or self._tail_of is not run:
            self._tail, self._tail_of, self._events = run.tail(), run, []
        self._events += self._tail.poll()
        newest = max((int(event.get("step") or 0) for event in self._events), default=0)
        self._events = [
            each for each in self._events if int(each.get("step") or newest) > newest - _KEPT_STEPS
        ]
        return self._events

    def _show(
        self,
        found: Explanation | None,
        verdict: Verdict | None = None,
        problem: str = "",
        *,
        is_alive: bool = False,
    ) -> None:
        """Show an explanation; its change can be run once the run has ended, because two runs slow each other down."""
        self.found = found
        lines = [safe(problem), "" if found is None else safe(found.sentence)]
        if verdict is not None:
            so_far = "So far: " if is_alive else ""
            lines.insert(0, f"<b>{so_far}{safe(verdict.finding)}</b> {safe(verdict.more)}")
        told = "<br>".join(filter(None, lines))
        self.line.value = f'<div role="status">{told}</div>' if told else ""
        self.button.disabled = is_alive
        self.button.layout.display = None if found is not None and found.change is not None else "none"
        self.box.layout.display = None if self.line.value else "none"
