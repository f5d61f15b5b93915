"""The list of runs, each with a checkbox to show it in the plots, a sample of its line style, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import traitlets as t

from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.kit.markup import classed, heading_html, words_html
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.training_lab._runbook import RunEntry
from shardscope_widgets.training_lab._words import state_text
from shardscope_widgets.words import plural, safe

MOST_ROWS = 40
"""Maximum number of runs listed, newest first."""
_NONE = "none yet; all runs are stored on disk and listed here"


class _Row:
    """Widgets of one run. They are never closed, because a box with a closed child is empty after a page reload."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.tick = widgets.Checkbox(indent=False)
        self.tick.tooltip = "Show this run in the plots"
        self.about = widgets.HTML()
        self.box = classed(widgets.VBox([self.tick, self.about]), "ss-run")

    def write(self, entry: RunEntry, look: RunStyle | None) -> None:
        self.tick.description = entry.trace.label
        when = f"{plural(entry.trace.world_size, 'rank')} · {state_text(entry)}"
        self.about.value = f'{swatch(look)}<span class="ss-about {safe(entry.state)}">{safe(when)}</span>'


class History(widgets.VBox):  # type: ignore[misc]
    """Rows of runs, newest first. `shown` contains the ids of the ticked runs, oldest first."""

    shown = t.List(t.Unicode())
    group = t.Unicode("")
    shows_tools = t.Bool(False)

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._head = widgets.HTML()
        self._list = classed(widgets.VBox(), "ss-runs")
        self._note = widgets.HTML()
        self.groups = widgets.Dropdown(description="Group", options=[("no runs", "")], value="")
        self.groups.tooltip = "Runs of one group share the plots; by default, a group is a model and its data"
        self.tools = widgets.Checkbox(description="Show probes and checks", indent=False)
        self.tools.tooltip = "Also list runs that tools launched, such as those of checks and calibrations"
        self._is_filling = False
        super().__init__([self._head, classed(self.groups, "ss-group"), self._list, self.tools, self._note])
        self.groups.observe(self._regroup, "value")
        widgets.link((self.tools, "value"), (self, "shows_tools"))
        self.update({}, {})

    def update(self, entries: Mapping[str, RunEntry], looks: Mapping[str, RunStyle], note: str = "") -> None:
        """Show these runs in the list.

        Args:
            entries: Runs by id, oldest first.
            looks: Line styles by run id; these runs are ticked.
            note: Line to show below the list.
        """
        listed = list(entries)[::-1][:MOST_ROWS]
        known = f"{len(looks)} of {len(entries)} shown"
        self._head.value = heading_html("Runs", known if entries else _NONE)
        self.groups.layout.display = None if len(self.groups.options) > 1 else "none"
        self._note.value = words_html(note)
        for run_id in listed:
            row = self._rows.get(run_id) or self._new_row(run_id)
            row.write(entries[run_id], looks.get(run_id))
            row.tick.value = run_id in looks
        boxes = tuple(self._rows[run_id].box for run_id in listed)
        if boxes != self._list.children:
            self._list.children = boxes

    def offer(self, groups: Mapping[str, int], chosen: str) -> None:
        """Offer these groups, with their numbers of runs, and select `chosen`."""
        options = [(f"{name} ({count})", name) for name, count in groups.items()] or [("no runs", "")]
        self._is_filling = True
        try:
            if tuple(options) != tuple(self.groups.options):
                self.groups.options = options
            if chosen in groups:
                self.groups.value = self.group = chosen
        finally:
            self._is_filling = False

    def _regroup(self, change: Mapping[str, Any]) -> None:
        if not self._is_filling and change["new"]:
            self.group = change["new"]

    def _new_row(self, run_id: str) -> _Row:
        row = self._rows[run_id] = _Row(run_id)
        row.tick.observe(lambda change: self._ticked(run_id, change), "value")
        return row

    def _ticked(self, run_id: str, change: Mapping[str, Any]) -> None:
        if change["new"] != (run_id in self.shown):
            rest: Sequence[str] = [other for other in self.shown if other != run_id]
            self.shown = [*rest, run_id] if change["new"] else list(rest)
