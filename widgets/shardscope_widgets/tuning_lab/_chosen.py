"""Panel of the chosen trial: settings, loss curve, bytes by collective, and actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from shardscope.runlog.summary import summarise
from shardscope.runtime.record.run import Run
from shardscope.spec import Job
from shardscope_widgets.figures import _collectives, theme
from shardscope_widgets.figures._curves import loss_info
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.trace import Trace
from shardscope_widgets.tuning_lab import _code
from shardscope_widgets.words import safe

if TYPE_CHECKING:
    from shardscope.runlog.tail import Tail

BUTTONS = {
    "open": (
        "Open run",
        "folder-open",
        "Show this trial's run as in the Training Lab: timeline, memory, schedule",
    ),
    "prune": ("Prune", "scissors", "Stop this trial now and count it as pruned"),
    "pin": ("Pin", "star", "Mark this trial for everyone who opens the study"),
    "apply": ("Apply", "check", "Store this trial's job in lab.applied, and show its code to copy"),
    "again": ("Again", "repeat", "Run the same settings again as an additional trial"),
}


@dataclass
class Watched:
    """The run of a trial, followed while it trains.

    A trial can consist of several runs; `run` is the newest run.

    Args:
        pieces: Paths of the trial's runs, in order.
    """

    pieces: tuple[str, ...]
    run: Run = field(init=False)
    trace: Trace = field(init=False)
    _tails: list[Tail] = field(default_factory=list)

    def __post_init__(self) -> None:
        runs = [Run.attach(path) for path in self.pieces]
        self.run, self.trace = runs[-1], Trace.of(runs[-1])
        self._tails = [run.tail() for run in runs]

    def continue_with(self, pieces: tuple[str, ...]) -> bool:
        """Follow the trial into its newer runs; return False if `pieces` belongs to another trial.

        Args:
            pieces: Paths of all runs of the trial so far, in order.
        """
        known = len(self.pieces)
        if pieces[:known] != self.pieces:
            return False
        for path in pieces[known:]:
            self.run = Run.attach(path)
            self._tails.append(self.run.tail())
        self.pieces = pieces
        return True

    def poll(self) -> bool:
        """Read new events; return whether any of them changes the display."""
        events = [event for tail in self._tails for event in tail.poll()]
        return self.trace.feed(events)

    def uncompressed_bytes(self) -> float | None:
        """Return the bytes that all ranks would send per step without compression; None for an uncompressed run."""
        return summarise(self.trace, self.run.state, self.run.job).uncompressed_bytes_per_step


class ChosenPanel:
    """Widgets of the chosen trial. The panel draws the data it receives; the lab decides what to draw."""

    def __init__(self) -> None:
        self.head, self.figures, self.words, self.code = (widgets.HTML() for _ in range(4))
        self.buttons = {
            key: widgets.Button(description=name, icon=icon, tooltip=about)
            for key, (name, icon, about) in BUTTONS.items()
        }
        self.loss, self.bytes = LiveFigure(theme.blank()), LiveFigure(theme.blank())
        self.box = self._arrange()
        self.box.layout.display = "none"

    def _arrange(self) -> widgets.VBox:
        for part in (self.loss, self.bytes, self.code):
            part.add_class("ss-side")
        bar = classed(widgets.HBox(list(self.buttons.values())), "ss-buttons")
        self._plots = plots = classed(widgets.HBox([self.loss, self.bytes]), "ss-plots")
        told = classed(widgets.HBox([self.figures, self.code]), "ss-plots")
        return classed(widgets.VBox([self.head, bar, plots, self.words, told]), "ss-chosen")

    def say_what_can_be_done(self, *, run: bool, prune: bool, finished: bool, pinned: bool) -> None:
        """Enable or disable the buttons.

        Args:
            run: Whether the trial has a run to open.
            prune: Whether the trial can be pruned here.
            finished: Whether the trial can be run again.
            pinned: Whether the trial is pinned.
        """
        self.buttons["open"].disabled = not run
        self.buttons["prune"].disabled = not prune
        self.buttons["again"].disabled = not finished
        self.buttons["pin"].description = "Unpin" if pinned else "Pin"

    def draw_run(self, watched: Watched | None) -> None:
        """Draw the loss of the run and the bytes that it sent, by collective."""
        has_steps = watched is not None and bool(watched.trace.steps)
        self._plots.layout.display = None if has_steps else "none"
        if watched is None or not has_steps:
            told = "This trial has not finished a step yet." if watched is not None else ""
            self.words.value = words_html(told)
            return
        self.loss.figure = _loss_spec(watched.trace)
        formula = watched.uncompressed_bytes()
        info = _collectives.collectives_info(
            watched.trace.collectives, len(watched.trace.steps), formula=formula
        )
        self.bytes.figure = _collectives.collectives_spec(info)
        self.words.value = words_html(_collectives.collectives_text(info))

    def show_code(self, job: Job | None) -> None:
        """Show the job as Python code to copy; None clears the code."""
        if job is None:
            self.code.value = ""
            return
        text = f"import shardscope as ss\n\njob = {_code.job_code(job)}\nrun = ss.launch(job)"
        self.code.value = (
            f'<div class="ss-code" aria-label="This job as Python" tabindex="0">{safe(text)}</div>'
        )


def _loss_spec(trace: Trace) -> dict[str, Any]:
    """Return the training loss as Plotly JSON: a faint line for the values, a bold line for the moving average."""
    curve = loss_info([trace]).curves[0]
    colour = theme.strategy_colour(trace.strategy)
    looks = ((curve.values, 1, 0.4, "as measured"), (curve.smooth, 2.2, 1.0, "moving average"))
    lines = [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": list(curve.steps), "y": list(values),
            "line": {"color": colour, "width": width}, "opacity": opacity,
            "hovertemplate": "step %{x}: %{y:.4g}<extra></extra>",
        }
        for values, width, opacity, name in looks
    ]  # fmt: skip
    split = trace.evaluations[-1].split if trace.evaluations else "validation"
    held = {
        "type": "scatter", "mode": "markers", "name": f"{split} split", "x": [each.step for each in trace.evaluations],
        "y": [each.loss if isfinite(each.loss) else None for each in trace.evaluations],
        "marker": {"symbol": "circle-open", "size": 7, "color": theme.GREY},
        "hovertemplate": f"{split} split, step %{{x}}: %{{y:.4g}}<extra></extra>",
    }  # fmt: skip
    layout = theme.look(height=210, margin={"l": 8, "r": 8, "t": 26, "b": 8})
    legend = theme.LEGEND_ABOVE | {"font": {"size": 11}, "itemclick": False}
    return {
        "data": [*lines, held],
        "layout": layout
        | {"legend": legend, "xaxis": theme.axis("step"), "yaxis": theme.axis("loss", nticks=5)},
    }
