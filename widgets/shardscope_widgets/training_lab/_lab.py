"""The Training Lab itself: choices on the left, what the runs tell on the right, and the wiring between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import ipywidgets as widgets
import traitlets as t
from IPython.display import HTML, display, update_display

from shardscope.errors import ShardscopeError
from shardscope_widgets.figures._overview import MOST_RUNS
from shardscope_widgets.figures.theme import Look, run_looks
from shardscope_widgets.html import summary_html
from shardscope_widgets.ring_view import RingView
from shardscope_widgets.training_lab import _controls, _words
from shardscope_widgets.training_lab._choices import Choices
from shardscope_widgets.training_lab._driver import Driver
from shardscope_widgets.training_lab._frame import Frame
from shardscope_widgets.training_lab._history import History
from shardscope_widgets.training_lab._live import LiveView
from shardscope_widgets.training_lab._runbook import Entry, RunBook
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope_widgets.trace import Trace

SHOWN_AT_FIRST = 4
LOOK_FOR_RUNS_EVERY_S = 2.0
DRAW_DETAILS_EVERY_S = 0.5
ABOUT = "real ranks, in processes of their own: close the tab and they train on"


class TrainingLab(widgets.VBox, Choices):  # type: ignore[misc]
    """Choose a job, start it on real ranks, watch it, stop it, and lay runs over each other.

    Constructing it starts no rank. Runs live on disk: a new lab, after a reload of the page or a restart of
    the kernel, shows them all and follows those that are still running.

    Args:
        root: Folder of the runs; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
        choices: Any trait of `Choices` to start from, for example ``model=make_model, world_size=4``.

    Example:
        >>> lab = TrainingLab(model="gpt-nano", strategy="ring", world_size=2)  # doctest: +SKIP
        >>> lab.start()  # what the button does
    """

    shown = t.List(t.Unicode(), help="Ids of the runs that are laid over each other, oldest first.")
    focus = t.Unicode("", help="Id of the run whose timeline and ring are shown, and that `stop` stops.")
    status = t.Unicode("", help="What is going on, in words.")
    problem = t.Unicode("", help="The last error, as HTML; empty when all is well.")

    def __init__(self, *, root: Path | str | None = None, **choices: Any) -> None:
        self._lock = threading.RLock()
        self._book = RunBook(Path(root) if root is not None else None)
        self._seen_at = self._detailed_at = 0.0
        self._due = False
        self._published = ""
        self._display_id: str | None = None
        Choices.__init__(self)
        super().__init__()
        self._choose(choices)
        self._build()
        self._wire()
        self._driver = Driver(self._beat)
        self.refresh()
        self._driver.start()

    # -- what code can do
    # ---------------------------------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """The run in focus: the one that was started last, unless another was chosen."""
        entry = self._book.entries.get(self.focus)
        return entry.run if entry else None

    @property
    def runs(self) -> list[Run]:
        """All runs on disk, newest first."""
        return [entry.run for entry in reversed(self._book.entries.values())]

    def start(self) -> Run:
        """Start the job that the controls describe, as the Start button does.

        Raises:
            ShardscopeError: The job cannot exist or the ranks cannot be started.
        """
        from shardscope.runtime import launch

        run = launch(self.job(), root=self._book.root)
        self.watch(run)
        return run

    def watch(self, run: Run) -> None:
        """Show a run that was started elsewhere, for example from a cell."""
        with self._lock:
            self._book.add(run)
            self.problem = ""
            self.shown = [*[other for other in self.shown if other != run.id], run.id][-MOST_RUNS:]
            self.focus = run.id
            self.refresh()

    def stop(self) -> None:
        """Stop the run in focus, as the Stop button does. Returns at once; ``lab.run.wait()`` waits for the
        end.
        """
        run = self.run
        if run is not None:
            threading.Thread(target=self._guard(run.stop), name="shardscope-stop", daemon=True).start()

    def refresh(self) -> None:
        """Look at the disk and draw everything now, instead of at the next beat."""
        with self._guarded():
            self._seen_at = self._detailed_at = 0.0
            self._update(everything=True)

    def close(self) -> None:
        """Take the lab down; runs go on."""
        if hasattr(self, "_driver"):
            self._driver.stop()
        super().close()

    def __repr__(self) -> str:
        return f"TrainingLab({len(self._book.entries)} runs, {self.status})"

    # -- building
    # -----------------------------------------------------------------------------------------------

    def _choose(self, choices: dict[str, Any]) -> None:
        names = set(Choices.class_own_traits())
        for name in sorted(choices, key=lambda name: name == "lr"):
            if name not in names:
                raise TypeError(f"TrainingLab has no choice {name!r}; there are {', '.join(sorted(names))}")
            setattr(self, name, choices[name])

    def _build(self) -> None:
        self.controls = _controls.make_controls(self)
        self.start_button = widgets.Button(description="Start", icon="play", button_style="primary")
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.start_button.tooltip = "Start this job on real ranks"
        self.stop_button.tooltip = "Stop the run in focus at its next step"
        self._plan, self._status_line, self._problem_box = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.history, self.live, self.ring = History(), LiveView(), RingView()
        self._summary, self._frame = widgets.HTML(), Frame(title="Training Lab", about=ABOUT)
        self.tabs = widgets.Tab(
            [self.live.box, self._summary, self.ring], titles=("Live", "Side by side", "Ring")
        )
        self.children = self._arrange()
        self.add_class("ss-lab")

    def _arrange(self) -> tuple[widgets.Widget, ...]:
        buttons = widgets.HBox([self.start_button, self.stop_button])
        left = widgets.VBox([_controls.panel(self.controls), buttons, self._plan, self.history])
        right = widgets.VBox([self._status_line, self._problem_box, self.tabs])
        main = widgets.HBox([left, right])
        for box, name in ((buttons, "ss-buttons"), (left, "ss-left"), (right, "ss-right"), (main, "ss-main")):
            box.add_class(name)
        return self._frame, main

    def _wire(self) -> None:
        self.start_button.on_click(self._guard(self.start))
        self.stop_button.on_click(self._guard(self.stop))
        self.observe(self._guard(self._replan), [*Choices.class_own_traits()])
        self.observe(self._guard(self._refocus), ["focus", "shown"])
        self.history.observe(self._guard(self._take_ticks), "shown")
        self.live.focus.observe(self._guard(self._take_focus), "value")
        self.live.window.observe(self._guard(self._draw_details), "value")
        self.live.last_step.observe(self._guard(self._take_step), "value")
        self.live.follow.observe(self._guard(self._draw_details), "value")
        self._replan()

    # -- errors in place
    # ----------------------------------------------------------------------------------------

    def _guard(self, act: Callable[[], object]) -> Callable[..., None]:
        """`act` as a callback whose errors show in the lab; whatever the caller passes is not needed."""

        def callback(*_ignored: object) -> None:
            with self._guarded(lock=act != self.stop):
                act()

        return callback

    @contextmanager
    def _guarded(self, *, lock: bool = True) -> Iterator[None]:
        try:
            if lock:
                with self._lock:
                    yield
            else:
                yield
        except ShardscopeError as error:
            self._say_problem(safe(error))
        except Exception as error:
            self._say_problem(f"{safe(type(error).__name__)}: {safe(error)}")

    def _say_problem(self, inner: str) -> None:
        self.problem = _words.problem_html(inner)

    @t.observe("problem")
    def _show_problem(self, _change: object) -> None:
        if hasattr(self, "_problem_box"):
            self._problem_box.value = self.problem

    # -- what the controls do
    # -----------------------------------------------------------------------------------

    def _replan(self) -> None:
        """Say what Start would do, or why it cannot."""
        self.controls["world_size"].disabled = self.num_ranks == 1
        for name in ("directions", "trace_chunks"):
            self.controls[name].disabled = self.strategy != "ring"
        try:
            text, bad = f"{_words.strategy_text(self.strategy)} {_words.plan_text(self.job())}", ""
        except ShardscopeError as error:
            text, bad = str(error), " bad"
        self.start_button.disabled = bool(bad)
        self._plan.value = f'<div class="ss-note{bad}">{safe(text)}</div>'

    def _take_ticks(self) -> None:
        self.shown = self.history.shown[-MOST_RUNS:]

    def _take_focus(self) -> None:
        if self.live.focus.value:
            self.focus = self.live.focus.value

    def _take_step(self) -> None:
        if not self.live.is_offering:
            self.live.follow.value = False
            self._draw_details()

    def _refocus(self) -> None:
        if self.focus not in self.shown:
            self.focus = self.shown[-1] if self.shown else ""
        self.problem = ""
        self.refresh()

    # -- what the runs tell
    # -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        with self._guarded():
            self._update()

    def _update(self, *, everything: bool = False) -> None:
        """Read what is new and draw what it changes."""
        now = time.monotonic()
        if everything or now - self._seen_at > LOOK_FOR_RUNS_EVERY_S:
            self._seen_at = now
            everything |= self._book.find()
            self._follow_new_runs()
        alive = {run_id for run_id, entry in self._book.entries.items() if entry.is_alive}
        changed = self._book.poll(self.shown)
        if changed or everything:
            self._draw_runs()
            self._due = True
        for run_id in alive & changed:
            self._ended(self._book.entries[run_id])
        if self._due and now - self._detailed_at > DRAW_DETAILS_EVERY_S:
            self._detailed_at, self._due = now, False
            self._draw_details()
            self._draw_summary()

    def _follow_new_runs(self) -> None:
        """Tick the newest runs at first, and later those that were started elsewhere."""
        if not self.shown and not self.history.shown:
            self._set_shown(list(self._book.entries)[-SHOWN_AT_FIRST:])

    def _set_shown(self, run_ids: list[str]) -> None:
        self.set_trait("shown", run_ids)

    def _shown_entries(self) -> list[Entry]:
        return [self._book.entries[run_id] for run_id in self.shown if run_id in self._book.entries]

    def _focus_trace(self) -> Trace | None:
        entry = self._book.entries.get(self.focus)
        return entry.trace if entry else None

    def _draw_runs(self) -> None:
        entries = self._shown_entries()
        traces = [entry.trace for entry in entries]
        looks = run_looks([trace.strategy for trace in traces])
        by_id: dict[str, Look] = {entry.run.id: look for entry, look in zip(entries, looks, strict=True)}
        self.history.shown = list(by_id)
        self.history.update(self._book.entries, by_id)
        self.live.offer_runs({entry.run.id: entry.trace.label for entry in entries}, self.focus)
        self.live.draw_overview(traces, looks)
        self._draw_status()

    def _draw_status(self) -> None:
        entry = self._book.entries.get(self.focus)
        self.status = _words.status_text(entry)
        state = entry.state if entry else "idle"
        self._status_line.value = (
            f'<div class="ss-status {safe(state)}" role="status">{safe(self.status)}</div>'
        )
        self.stop_button.disabled = entry is None or not entry.is_alive
        if entry is not None and entry.state == "failed":
            self._show_failure(entry)

    def _draw_details(self) -> None:
        trace = self._focus_trace()
        self.live.draw_timeline(trace)
        if trace is not None and trace.chunks:
            self.ring.show(trace)

    def _draw_summary(self) -> None:
        self._summary.value = summary_html([entry.trace for entry in self._shown_entries()])

    def _ended(self, entry: Entry) -> None:
        """A run that was alive at the last look may have ended: show why, and leave the result in the
        notebook.
        """
        if entry.is_alive:
            return
        if entry.state == "failed":
            self._show_failure(entry)
        self._draw_summary()
        self._publish()

    def _show_failure(self, entry: Entry) -> None:
        error = entry.run.error
        if error is not None:
            self.problem = _words.failure_html(entry, error)

    # -- a result that stays
    # ------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """Show the lab, and below it a place for results that stays readable when nothing runs any more."""
        super_display = self._repr_mimebundle_()
        display(super_display, raw=True)
        self._display_id = self._display_id or uuid4().hex
        display(HTML(self._published), display_id=self._display_id)

    def _publish(self) -> None:
        self._published = summary_html([entry.trace for entry in self._shown_entries()])
        if self._display_id is not None:
            update_display(HTML(self._published), display_id=self._display_id)
