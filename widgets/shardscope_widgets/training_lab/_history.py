"""The list of runs, each with a checkbox to show it in the plots, a sample of its line style, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.training_lab._words import state_text
from shardscope_widgets.words import plural, safe

MOST_ROWS = 40
"""Maximum number of runs listed, newest first."""


class _Row:
    """Widgets of one run; created once and kept, because a closed child widget leaves its box empty after a reload."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.tick = widgets.Checkbox(indent=False)
        self.tick.tooltip = "Show this run in the plots"
        self.about = widgets.HTML()
        self.box = widgets.VBox([self.tick, self.about])
        self.box.add_class("ss-run")

    def write(self, entry: RunEntry, look: RunStyle | None) -> None:
        self.tick.description = entry.trace.label
        when = f"{plural(entry.trace.world_size, 'rank')} · {state_text(entry)}"
        self.about.value = f'{swatch(look)}<span class="ss-about {safe(entry.state)}">{safe(when)}</span>'


class History(widgets.VBox):  # type: ignore[misc]
    """Rows of runs, newest first. `shown` has the ids of the ticked runs, oldest first."""

    shown = t.List(t.Unicode())

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._head = widgets.HTML()
        self._list = widgets.VBox()
        self._list.add_class("ss-runs")
        self._note = widgets.HTML()
        super().__init__([self._head, self._list, self._note])
        self.update({}, {})

    def update(self, entries: Mapping[str, RunEntry], looks: Mapping[str, RunStyle], note: str = "") -> None:
        """Show these runs.

        Args:
            entries: Runs by id, oldest first.
            looks: Line styles by run id; these runs are ticked.
            note: Line to show below the list.
        """
        listed = list(entries)[::-1][:MOST_ROWS]
        self._head.value = _head(len(entries), len(looks))
        self._note.value = f'<div class="ss-words">{safe(note)}</div>' if note else ""
        for run_id in listed:
            row = self._rows.get(run_id) or self._new_row(run_id)
            row.write(entries[run_id], looks.get(run_id))
            row.tick.value = run_id in looks
        boxes = tuple(self._rows[run_id].box for run_id in listed)
        if boxes != self._list.children:
            self._list.children = boxes

    def _new_row(self, run_id: str) -> _Row:
        row = self._rows[run_id] = _Row(run_id)
        row.tick.observe(lambda change: self._ticked(run_id, change), "value")
        return row

    def _ticked(self, run_id: str, change: Mapping[str, Any]) -> None:
        if change["new"] != (run_id in self.shown):
            rest: Sequence[str] = [other for other in self.shown if other != run_id]
            self.shown = [*rest, run_id] if change["new"] else list(rest)


def _head(known: int, shown: int) -> str:
    note = f"{shown} of {known} shown" if known else "none yet; each run is kept on disk and listed here"
    return f'<div class="ss-heading">Runs <span>{note}</span></div>'
