"""The step player as a widget, as a file of its own, and as an animated picture."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets as t

from shardscope.errors import SpecError
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.step_events import StepEvents
from shardscope.runtime import Run
from shardscope_widgets.figures import theme
from shardscope_widgets.kit.markup import words_html
from shardscope_widgets.kit.still import Still, image_html
from shardscope_widgets.step_player._cells import cells_of, num_summed
from shardscope_widgets.step_player._picture import MOST_RANKS, picture_svg, write_picture
from shardscope_widgets.words import duration_text, plural

EMPTY = "No step has been recorded yet. A run records the messages of its third step."
_SCRIPTS = ("data.js", "stage.js", "timeline.js", "player.js")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
html {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 12px; background: Canvas; display: flex; justify-content: center; }}
body > div {{ width: 100%; max-width: 1180px; }}
</style></head>
<body class="ss-alone"><div id="player"></div>
<script type="module">
{script}
const values = {values};
const listeners = {{}};
const model = {{
  get: (name) => values[name],
  set: (name, value) => {{
    if (values[name] === value) return;
    values[name] = value;
    for (const act of listeners[`change:${{name}}`] ?? []) act();
  }},
  save_changes: () => {{}},
  on: (name, act) => (listeners[name] ??= []).push(act),
  off: (name, act) => {{ listeners[name] = (listeners[name] ?? []).filter((other) => other !== act); }},
}};
render({{ model, el: document.getElementById("player") }});
</script></body></html>
"""


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_KEYS = files("shardscope_widgets.kit").joinpath("keys.js").read_text(encoding="utf-8")
_SCRIPT = "\n".join((_KEYS, *map(_text, _SCRIPTS)))


class StepPlayer(Still, anywidget.AnyWidget):
    """An animation of one training step: what each rank holds, messages, timeline and memory.

    It plays automatically in a loop, unless the reader's system requests reduced motion. Space plays and pauses, the
    arrow keys move from event to event, Home and End jump to the ends. An event or a cell under the pointer, or
    a selected event, is explained in a sentence.

    Args:
        source: A run, whose recorded step is shown, or `StepEvents`, such as those of `ss.simulate.step_events`; None
            shows a hint.
        step: Number of the step of a run; None for the step whose messages were recorded.
        measured: A run or step to show below the first step, on the same time axis; None for none.

    Example:
        >>> StepPlayer(run)  # doctest: +SKIP
        >>> StepPlayer(ss.simulate.step_events(job, cluster))  # doctest: +SKIP
    """

    _esm = f"{_SCRIPT}\nexport default {{ render }};"
    _css = _text("player.css")

    events = t.Dict(help="The step, as `StepEvents.to_dict`, with colours.").tag(sync=True)
    position = t.Float(0.0, min=0.0, max=1.0, help="Position in the playback, 0 to 1.").tag(sync=True)
    measured = t.Dict(help="A second step, drawn below the first, in the same form; empty for none.").tag(
        sync=True
    )
    plays = t.Int(0, min=0, max=1, help="Which of the two steps the ranks show.").tag(sync=True)
    note = t.Unicode("", help="A sentence below the steps, such as where they ran.").tag(sync=True)
    playing = t.Bool(False).tag(sync=True)
    speed = t.Float(1.0, help="Playback speed; at 1, a step takes 12 seconds.").tag(sync=True)
    selected = t.Int(-1, help="Index of the selected event in `step_events.events`; -1 for none.").tag(
        sync=True
    )
    empty = t.Unicode(EMPTY).tag(sync=True)

    def __init__(
        self,
        source: Run | StepEvents | None = None,
        *,
        step: int | None = None,
        measured: Run | StepEvents | None = None,
        **traits: Any,
    ) -> None:
        super().__init__(**traits)
        self.step_events: StepEvents | None = None
        if source is not None:
            self.show(source, step=step, measured=measured)

    def show(
        self,
        source: Run | StepEvents | None,
        *,
        step: int | None = None,
        measured: Run | StepEvents | None = None,
    ) -> None:
        """Show another run or step, from its start; arguments as for the class."""
        self.step_events, second = _events(source, step), _events(measured)
        with self.hold_sync():
            self.playing, self.position, self.selected, self.plays = True, 0.0, -1, 0
            self.measured = player_dict(second)
            self.events = player_dict(self.step_events)

    def add(self, measured: Run | StepEvents) -> None:
        """Show a measured step below the current step, which continues to play."""
        self.measured = player_dict(_events(measured))

    def html(self, path: str | Path) -> str:
        """Write a page that plays this step without a notebook and without a network, and return its path.

        Raises:
            SpecError: No step is shown.
        """
        shown = self._shown()
        values = {
            "events": self.events,
            "measured": self.measured,
            "plays": 0,
            "note": self.note,
            "position": 0.0,
            "playing": True,
            "speed": 1.0,
            "selected": -1,
            "empty": EMPTY,
        }
        page = _PAGE.format(
            title=escape(f"One training step: {shown.label}"), css=self._css, script=_SCRIPT,
            values=json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"),
        )  # fmt: skip
        Path(path).write_text(page, encoding="utf-8")
        return str(path)

    def picture(self, path: str | Path, *, seconds: float = 14.0) -> str:
        """Write an animated SVG of this step, for a README, and return its path.

        Args:
            path: The file to write.
            seconds: Duration of one playback of the step, in seconds; the animation then starts again.

        Raises:
            SpecError: No step is shown, or it has more than 8 ranks.
        """
        return write_picture(self._shown(), path, seconds=seconds)

    def _kept(self) -> list[widgets.Widget | str]:
        step = self.step_events
        if step is None:
            return [words_html(EMPTY)]
        took = f"a step takes {duration_text(step.step_time_s)} on {plural(step.world_size, 'rank')}"
        drawn = picture_svg(step, seconds=14.0) if step.world_size <= MOST_RANKS else ""
        said = words_html(f"{step.label}, {step.origin}: {took}.")
        return [said, image_html(drawn, step.label), words_html(self.note)]

    def _shown(self) -> StepEvents:
        if self.step_events is None:
            raise SpecError("this player shows no step; give it a run or step events with show(...)")
        return self.step_events


def _events(source: Run | StepEvents | None, step: int | None = None) -> StepEvents | None:
    return source if isinstance(source, StepEvents) or source is None else source.step_events(step)


def player_dict(step: StepEvents | None) -> dict[str, Any]:
    """Return the values that the JavaScript reads: the step, its cells, and a colour and pattern for each activity."""
    if step is None:
        return {}
    looks = {kind: theme.span_look(kind) for kind in sorted({event.kind for event in step.events})}
    return step.to_dict() | {
        "looks": {kind: [look.colour, look.pattern] for kind, look in looks.items()},
        "axis_looks": {axis: theme.axis_colour(axis) for axis, _ in step.arrangement.axes},
        "num_summed": num_summed(step),
        "memory_looks": {kind: theme.MEMORY_LOOKS[kind].colour for kind in MEMORY_KINDS},
        "cells": [
            [*cell[:4], [round(value, 4) for at, level in cell.keys for value in (1e6 * at, level)]]
            for cell in cells_of(step)
        ],
    }
