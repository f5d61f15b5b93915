"""The Fault Lab widget: the timeline of one run, live while the run continues, and the buttons that break the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope.runtime import Run
from shardscope_widgets.fault_lab._breaker import Breaker
from shardscope_widgets.fault_lab._resumer import carry_on
from shardscope_widgets.fault_lab._view import FaultsView
from shardscope_widgets.kit.clock import Clock
from shardscope_widgets.kit.form import check_options
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.markup import classed, status_html
from shardscope_widgets.kit.run_chooser import RunChooser
from shardscope_widgets.kit.still import Still
from shardscope_widgets.trace import Trace

ABOUT = "what failed, how the run recovered, and which steps were lost"
DRAW_EVERY_S = 0.5
"""Time between two redraws of a run that has not ended, in seconds."""


class FaultLab(Still, widgets.VBox):  # type: ignore[misc]
    """Timeline of a run's faults: when each rank trained, failed and restarted, and which steps were lost.

    It has buttons that inject faults. The lab follows a run until it ends, and shows an ended run from its directory.

    Args:
        run: The run to show, or its name or path; None shows the newest run.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        choices: Initial values of any traits.

    Example:
        >>> run = ss.launch(job, faults=ss.Faults().kill(rank=1, step=12))  # doctest: +SKIP
        >>> FaultLab(run)  # doctest: +SKIP
    """

    run_id = t.Unicode("", help="Name of the run that is shown; empty if there is none.")
    problem = t.Unicode("", help="The last error, as HTML; empty if there is none.")

    def __init__(
        self, run: Run | str | Path | None = None, *, root: str | Path | None = None, **choices: Any
    ) -> None:
        check_options("FaultLab", choices, self.class_own_traits())
        super().__init__()
        self._trace: Trace | None = None
        self._tail: Any = None
        self._state = ""
        self._guard = Guard(lambda problem: setattr(self, "problem", problem))
        self.chooser = RunChooser(run, root)
        self.status, self._problem = widgets.HTML(), widgets.HTML()
        self.breaker, self.view = Breaker(self._guard, self.resume), FaultsView()
        bar = classed(widgets.HBox([self.chooser.control, self.chooser.again]), "ss-run-bar")
        frame = Frame(title="Fault Lab", about=ABOUT)
        t.dlink((self, "run_id"), (frame, "subject"))
        self.children = (
            frame, bar, self.status, self._problem, self.breaker.box, self.view.box, self.breaker.resize_box,
        )  # fmt: skip
        classed(self, "ss-lab", "ss-fault-lab")
        self.chooser.offer("")
        self.run_id = self.chooser.first
        for name, value in choices.items():
            setattr(self, name, value)
        self._wire()
        self._begin()
        self._clock = Clock(self._beat, interval_s=DRAW_EVERY_S)
        self._clock.start()

    @property
    def run(self) -> Run | None:
        """The run that is shown; None if there is none."""
        return self.chooser.runs.get(self.run_id)

    def refresh(self) -> None:
        """Look for new runs, and draw the chosen run up to its newest event."""
        with self._guard.run():
            self.chooser.offer(self.run_id)
            self.run_id = self.run_id or self.chooser.first
            self._update(everything=True)

    def resume(self, run: Run) -> Run:
        """Start a run that continues `run` from its newest checkpoint, and show the new run, as the Resume button does.

        Raises:
            ShardscopeError: The run cannot be resumed.
        """
        resumed = carry_on(run, run.path.parent)
        self.chooser.offer(resumed.id)
        self.run_id = resumed.id
        return resumed

    def close(self) -> None:
        """Close the lab; runs continue."""
        if hasattr(self, "_clock"):
            self._clock.stop()
        super().close()

    def _kept(self) -> list[widgets.Widget | str]:
        return [self.status, self._problem, self.view.figure, self.view.words]

    def _wire(self) -> None:
        callback = self._guard.callback
        self.chooser.control.observe(
            callback(lambda: setattr(self, "run_id", self.chooser.control.value)), "value"
        )
        self.chooser.again.on_click(callback(self.refresh))
        self.observe(callback(self._begin), "run_id")
        self.observe(lambda change: setattr(self._problem, "value", change["new"]), "problem")

    def _begin(self) -> None:
        """Show the chosen run from its first event on."""
        run, self.problem = self.run, ""
        self._trace = None if run is None else Trace.of(run)
        self._tail = None if run is None else run.tail()
        self.chooser.mark(self.run_id)
        self._update(everything=True)

    def _beat(self) -> None:
        with self._guard.run():
            self._update()

    def _update(self, *, everything: bool = False) -> None:
        """Read new events, and draw what they change."""
        run, trace = self.run, self._trace
        if run is None or trace is None:
            self.status.value = status_html(self.chooser.why_not(self.run_id))
            self.view.draw(None)
            self.breaker.show(None, None)
            return
        before, self._state = self._state, run.state  # read first, so that no event before the end is missed
        if trace.feed(self._tail.poll()) or before != self._state or everything:
            progress = (
                "no step finished yet" if not trace.last_step else f"step {run.job.progress(trace.last_step)}"
            )
            self.status.value = status_html(f"{run.name}: {run.state_text}, {progress}.", self._state)
            self.view.draw(trace)
            self.breaker.show(run, trace)

    def __repr__(self) -> str:
        return f"FaultLab({self.run_id or 'no run'})"
