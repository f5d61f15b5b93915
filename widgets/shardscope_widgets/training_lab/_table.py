"""The tab that compares the ticked runs: settings and results, a baseline, means by setting, notes, and delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets

from shardscope.errors import ShardscopeError
from shardscope.measure.compare_runs.view import grouped_table
from shardscope.spec.settings import heading_of
from shardscope_widgets.html import comparison_html, comparison_of
from shardscope_widgets.kit.markup import classed, heading_html, note_html
from shardscope_widgets.training_lab._runbook import RunEntry

if TYPE_CHECKING:
    from shardscope.measure.compare_runs.comparison import RunsComparison
    from shardscope.runtime import Run
    from shardscope_widgets.kit.guard import Guard

_NONE = "none"


class RunsTable:
    """The table and its controls.

    Args:
        guard: Shows the errors of callbacks.
        on_change: Called after a note was written.
        on_delete: Called with a run that was deleted.
    """

    def __init__(self, guard: Guard, on_change: Callable[[], None], on_delete: Callable[[Run], None]) -> None:
        self.table, self.means, self.message = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.baseline = widgets.Dropdown(description="Baseline", options=[(_NONE, "")], value="")
        self.group_by = widgets.Dropdown(description="Group by", options=[(_NONE, "")], value="")
        self.run = widgets.Dropdown(description="Run", options=[(_NONE, "")], value="")
        self.note = widgets.Text(description="Note", continuous_update=False)
        self.delete = widgets.Button(description="Delete run", icon="trash")
        self.confirm = widgets.Button(description="Delete for good", icon="trash", button_style="danger")
        self.cancel = widgets.Button(description="Keep it")
        self._entries: dict[str, RunEntry] = {}
        self._is_filling = self._has_chosen = False
        self._on_change, self._on_delete = on_change, on_delete
        self.box = self._boxes()
        self._wire(guard.callback)

    def _boxes(self) -> widgets.VBox:
        self.baseline.tooltip = "Show results as changes relative to this run"
        self.group_by.tooltip = "Average results over runs with the same value of this setting"
        self.run.tooltip = "Run to annotate or delete"
        self.note.tooltip = "Your note on this run, stored in its directory"
        self.delete.tooltip = "Delete this run's directory; asks first"
        self.confirm.tooltip, self.cancel.tooltip = "Delete it; this cannot be undone", "Do not delete it"
        views = classed(widgets.HBox([self.baseline, self.group_by]), "ss-bar")
        acts = classed(
            widgets.HBox([self.run, self.note, self.delete, self.confirm, self.cancel]), "ss-bar", "ss-acts"
        )
        self._ask(is_asking=False)
        return widgets.VBox([views, self.table, self.means, acts, self.message])

    def _wire(self, callback: Callable[[Callable[[], None]], Callable[..., None]]) -> None:
        self.baseline.observe(callback(self._choose_baseline), "value")
        self.group_by.observe(callback(self._redraw), "value")
        self.run.observe(callback(self._choose), "value")
        self.note.observe(callback(self._annotate), "value")
        self.delete.on_click(callback(lambda: self._ask(is_asking=True)))
        self.cancel.on_click(callback(lambda: self._ask(is_asking=False)))
        self.confirm.on_click(callback(self._delete))

    def _choose_baseline(self) -> None:
        self._has_chosen |= not self._is_filling
        self._redraw()

    def _redraw(self) -> None:
        if not self._is_filling:
            self.draw(list(self._entries.values()))

    def draw(self, entries: Sequence[RunEntry]) -> None:
        """Draw the comparison of these runs."""
        self._entries = {entry.run.id: entry for entry in entries}
        traces = [entry.trace for entry in entries]
        self._fill(self.baseline, [(_NONE, ""), *self._labels()])
        if not self._has_chosen:
            self._select(self.baseline, self._usual_baseline())
        self._fill(self.run, self._labels() or [(_NONE, "")])
        found = comparison_of(
            traces, states={run_id: entry.state for run_id, entry in self._entries.items()},
            notes={run_id: entry.run.note for run_id, entry in self._entries.items()},
            baseline=self.baseline.value,
        )  # fmt: skip
        self.table.value = comparison_html(found, traces)
        self._draw_means(found)

    def _usual_baseline(self) -> str:
        """Return the baseline id of the newest run whose baseline is shown, else the first run; empty for one run."""
        if len(self._entries) < 2:
            return ""
        known = [entry.run.baseline for entry in reversed(self._entries.values())]
        return next((run_id for run_id in known if run_id in self._entries), next(iter(self._entries)))

    def _draw_means(self, found: RunsComparison | None) -> None:
        names = () if found is None else found.setting_names
        self._fill(self.group_by, [(_NONE, ""), *((heading_of(name), name) for name in names)])
        by = self.group_by.value
        self.means.value = (
            heading_html(f"Averages over runs with the same {heading_of(by)}")
            + grouped_table(found, by).html()
            if found is not None and by
            else ""
        )

    def _labels(self) -> list[tuple[str, str]]:
        return [(entry.trace.label, run_id) for run_id, entry in self._entries.items()]

    def _fill(self, control: widgets.Dropdown, options: list[tuple[str, str]]) -> None:
        """Offer these options, and keep the value if it is still one of them."""
        if tuple(options) == tuple(control.options):
            return
        value = control.value
        self._is_filling = True
        try:
            control.options = options
        finally:
            self._is_filling = False
        self._select(control, value if value in dict(options).values() else options[0][1])
        if control is self.run:
            self._choose()

    def _select(self, control: widgets.Dropdown, value: str) -> None:
        self._is_filling = True
        try:
            control.value = value
        finally:
            self._is_filling = False

    def _choose(self) -> None:
        """Show the note of the chosen run."""
        entry = self._entries.get(self.run.value)
        self._is_filling = True
        try:
            self.note.value = entry.run.note if entry is not None else ""
        finally:
            self._is_filling = False
        self._ask(is_asking=False)

    def _annotate(self) -> None:
        entry, text = self._entries.get(self.run.value), self.note.value
        if self._is_filling or entry is None or text == entry.run.note:
            return
        try:
            entry.run.note = text
        except ShardscopeError as error:
            self.message.value = note_html(str(error), is_bad=True)
        else:
            self.message.value = ""
            self._on_change()

    def _ask(self, *, is_asking: bool) -> None:
        self.delete.layout.display = "none" if is_asking else None
        for button in (self.confirm, self.cancel):
            button.layout.display = None if is_asking else "none"
        entry = self._entries.get(self.run.value)
        asked = (
            ""
            if entry is None
            else f"Delete {entry.trace.label} ({entry.run.id}) and everything it recorded?"
        )
        self.message.value = note_html(asked) if is_asking and asked else ""

    def _delete(self) -> None:
        entry = self._entries.get(self.run.value)
        self._ask(is_asking=False)
        if entry is None:
            return
        try:
            entry.run.delete()
        except ShardscopeError as error:
            self.message.value = note_html(str(error), is_bad=True)
        else:
            self._on_delete(entry.run)
