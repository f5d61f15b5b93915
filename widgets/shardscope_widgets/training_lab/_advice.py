"""The live explanation of the run in focus: its largest losses of time, each with a button that runs a change.

For a run that was started by this button, a verdict comes first: how its loss and speed differ from the baseline's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope_widgets.kit.background import Background
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.training_lab._words import LEAST_STEPS
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.measure.explain.losses import Cause
    from shardscope.measure.explain.of_run import Explanation
    from shardscope.measure.explain.verdict import Verdict
    from shardscope.runlog.tail import Event
    from shardscope.runtime import Run
    from shardscope_widgets.figures.theme import RunStyle
    from shardscope_widgets.training_lab._queue import ChangeQueue

AGAIN_AFTER_S = 3.0
"""Minimum seconds between two explanations of a running run; more if an explanation takes long to compute."""
_PATIENCE = 10
_KEPT_STEPS = 400
"""Number of newest steps whose events are kept to explain a run."""
_PRESS = "Apply this change in the form and run the job, once any run in progress has ended"
_QUEUED = "Will run when this run ends or is stopped"
_QUEUED_LATER = "Will run when no run is in progress"


class Subject(NamedTuple):
    """The run in focus.

    Attributes:
        run: The run.
        label: Name of the run in the lab.
        look: Line style of the run in the plots.
        num_steps: Number of finished steps.
        is_alive: Whether the run is still running.
        is_named: Whether the panel names the run, because other runs are shown or the form describes another job.
        baseline: The run whose suggested change this run tries; None if there is none.
    """

    run: Run
    label: str
    look: RunStyle | None
    num_steps: int
    is_alive: bool
    is_named: bool = False
    baseline: Run | None = None


class _Told(NamedTuple):
    """Findings about a run; `so_far` is true if the run had not ended when they were computed."""

    found: Explanation | None
    verdict: Verdict | None
    problem: str
    so_far: bool
    second: tuple[str, Mapping[str, Any]] | None = None


class AdvicePanel(Background):
    """Sentences on the run in focus, and a button to run each change that they suggest, at most two.

    Explanations are computed in a separate thread, and only after `begin` is called, when the lab is displayed. Until a
    run is explained, a placeholder replaces the previous run's text and keeps its height.

    Args:
        on_try: Called with the run and the changes to its job when the button is pressed.
    """

    def __init__(self, on_try: Callable[[Run, Mapping[str, Any]], None]) -> None:
        self.line, self.second_line = widgets.HTML(), widgets.HTML()
        self.button, self.second_button = widgets.Button(), widgets.Button()
        rows = ((self.line, self.button), (self.second_line, self.second_button))
        self.rows = [classed(widgets.HBox(row), "ss-advice") for row in rows]
        self.box = widgets.VBox(self.rows)
        self.queue: ChangeQueue | None = None
        self._on_try = on_try
        self._subject: Subject | None = None
        self._told: _Told | None = None
        self._last = ""
        self._known = (0, False)
        self._other: Cause | None = None
        self._due_at = 0.0
        self._begun = False
        self._tail: Any = None
        self._tail_of: Run | None = None
        self._events: list[Event] = []
        self.button.on_click(lambda _button: self.try_it())
        self.second_button.on_click(lambda _button: self.try_it(1))
        self._draw()

    @property
    def found(self) -> Explanation | None:
        """The explanation of the run in focus; None before it is known."""
        return None if self._told is None else self._told.found

    def begin(self) -> None:
        """Start explaining; call this when the lab is displayed."""
        self._begun = True

    def want(self, subject: Subject | None) -> None:
        """Request an explanation of a run and return at once; None clears the last explanation."""
        if (subject and subject.run.id) != (self._subject and self._subject.run.id):
            self._known, self._due_at, self._told, self._other = (0, False), 0.0, None, None
        self._subject = subject
        self._draw()
        if subject is None or not self._begun or self._is_fixed() or subject.num_steps < LEAST_STEPS:
            return
        now = (subject.num_steps, subject.is_alive)
        is_new = self._known != now and (time.monotonic() >= self._due_at or not subject.is_alive)
        if is_new and not self._is_busy:
            self._known = now
            self._start(self._work, subject, name="advice")

    def try_it(self, row: int = 0) -> None:
        """Call `on_try` with the change that a row suggests, as its button does."""
        change = self._changes()[row]
        if self._subject is not None and change is not None:
            self._on_try(self._subject.run, change)

    def _changes(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Return the change that each row suggests; None for none."""
        found, second = self.found, None if self._told is None else self._told.second
        return None if found is None else found.change, None if second is None else second[1]

    def _is_fixed(self) -> bool:
        """Return whether the text must not change, because the change that it suggests is queued."""
        subject, queue = self._subject, self.queue
        return subject is not None and subject.is_alive and queue is not None and queue.holds(subject.run)

    def _work(self, subject: Subject) -> None:
        from shardscope.measure.explain.of_run import explain_events, second_remedy
        from shardscope.measure.explain.verdict import verdict

        started, run = time.monotonic(), subject.run
        found, told, second, problem = None, None, None, ""
        try:
            found = explain_events(run, self._newest_events(run))
            second = second_remedy(run, found)
            told = None if subject.baseline is None else verdict(run, subject.baseline)
        except ShardscopeError:  # no step with spans yet, or a run that can no longer be read
            pass
        except Exception as error:  # noqa: BLE001 - nobody sees an error of a thread
            problem = f"The run cannot be explained: {type(error).__name__}: {error}"
        if self._subject is not None and run.id == self._subject.run.id and not self._is_fixed():
            self._due_at = time.monotonic() + max(AGAIN_AFTER_S, _PATIENCE * (time.monotonic() - started))
            steady = self._steady(found, subject)
            second = second if steady is found else None
            self._told = _Told(steady, told, problem, subject.is_alive, second)
            self._draw()

    def _steady(self, found: Explanation | None, subject: Subject) -> Explanation | None:
        """Return the explanation to show: during a run, a different cause must be found twice before it replaces the
        present one.
        """
        before = self.found
        is_other = subject.is_alive and found and before and found.cause not in (before.cause, self._other)
        self._other = found.cause if found is not None else None
        return before if is_other else found

    def _newest_events(self, run: Run) -> list[Event]:
        """Return the events of the newest steps; a long run has too many events to keep all."""
        if self._tail is None or self._tail_of is not run:
            self._tail, self._tail_of, self._events = run.tail(), run, []
        self._events += self._tail.poll()
        newest = max((int(event.get("step") or 0) for event in self._events), default=0)
        self._events = [
            each for each in self._events if int(each.get("step") or newest) > newest - _KEPT_STEPS
        ]
        return self._events

    def _draw(self) -> None:
        """Show what is known about the run in focus, the button, and the outcome of a waiting change."""
        subject, told = self._subject, self._told
        lines = [] if subject is None or told is None else _lines(subject, told)
        waiting = "" if lines or subject is None or not self._begun else _placeholder(subject, told)
        note = "" if self.queue is None else self.queue.note
        self._last = "".join(f"<div>{line}</div>" for line in lines) or (self._last if waiting else "")
        text = safe(waiting) if waiting else self._last
        text += f'<div class="ss-note">{safe(note)}</div>' if note else ""
        kept = f'<div class="ss-kept" aria-hidden="true">{self._last}</div>' if waiting else ""
        self.line.value = f'<div class="ss-stack"><div role="status">{text}</div>{kept}</div>' if text else ""
        self.box.layout.display = None if text else "none"
        second = None if told is None else told.second
        self.second_line.value = f"<div>{safe(second[0])}</div>" if second else ""
        self.rows[1].layout.display = None if second else "none"
        for button, change in zip((self.button, self.second_button), self._changes(), strict=True):
            self._draw_button(button, change, is_waiting=bool(waiting))

    def _draw_button(
        self, button: widgets.Button, change: Mapping[str, Any] | None, *, is_waiting: bool
    ) -> None:
        """Show the button for a change; until a run is explained, keep the space of the previous button."""
        subject, queue = self._subject, self.queue
        is_queued = subject is not None and queue is not None and queue.holds(subject.run, change)
        later = _QUEUED if subject is not None and subject.is_alive else _QUEUED_LATER
        button.description, button.icon = (later, "") if is_queued else ("Run it", "play")
        button.button_style = "info" if is_queued else ""
        button.tooltip = "Press again to cancel" if is_queued else _PRESS
        if not is_waiting:
            button.layout.display = None if change is not None else "none"
        button.layout.visibility = None if change is not None else "hidden"


def _placeholder(subject: Subject, told: _Told | None) -> str:
    """Return the text to show until a run is explained; empty if it will not be explained."""
    if subject.num_steps >= LEAST_STEPS and (told is None or subject.is_alive):
        return f"Finding out where the step time of {subject.label} goes …"
    if subject.is_alive and getattr(subject.run.job, "steps", LEAST_STEPS) < LEAST_STEPS:
        return f"{subject.label} is too short to find out where its step time goes; that needs {LEAST_STEPS} steps."
    if subject.is_alive:
        return (
            f"{subject.label} has started. Where its step time goes is shown here after {LEAST_STEPS} steps."
        )
    return ""


def _lines(subject: Subject, told: _Told) -> list[str]:
    """Return the findings about a run as lines of HTML, the verdict first."""
    lines = [told.problem and safe(told.problem), told.found and safe(told.found.sentence)]
    if told.verdict is not None:
        so_far = "So far: " if told.so_far else ""
        more = safe(told.verdict.more)
        folded = f"<details><summary>{more.partition(' (')[0]}</summary>{more}</details>" if more else ""
        lines.insert(0, f"<b>{so_far}{safe(told.verdict.finding)}</b>{folded}")
    kept = [line for line in lines if line]
    if kept and subject.is_named:
        kept[0] = f"{swatch(subject.look)}{safe(subject.label)}: {kept[0]}"
    return kept
