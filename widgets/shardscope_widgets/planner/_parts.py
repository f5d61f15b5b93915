"""The two clickable parts of the planner: the table and the scatter plot."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t

from shardscope_widgets.training_lab._live_figure import LiveFigure

_ON_CLICK = """
function clickable({ model, el }) {
  const stop = render({ model, el });
  const place = el.firstElementChild;
  const timer = setInterval(() => {
    if (!place.on) return;
    clearInterval(timer);
    place.on("plotly_click", (event) => {
      const kept = event.points.map((point) => point.customdata).find((value) => value !== undefined);
      if (kept === undefined) return;
      model.set("clicked", kept);
      model.save_changes();
    });
  }, 100);
  return () => { clearInterval(timer); stop(); };
}

export default { render: clickable };
"""


class ClickFigure(LiveFigure):
    """A live figure that reports the clicked point by its `customdata`, an integer."""

    _esm = LiveFigure._esm.replace("export default { render };", _ON_CLICK)  # noqa: SLF001
    clicked = t.Int(-1).tag(sync=True)


class PlanTable(anywidget.AnyWidget):
    """A table of text with one chosen row."""

    _esm = files(__package__).joinpath("table.js").read_text(encoding="utf-8")
    _css = files(__package__).joinpath("planner.css").read_text(encoding="utf-8")
    header = t.List(t.Unicode()).tag(sync=True)
    rows = t.List(t.List(t.Unicode())).tag(sync=True)
    chosen = t.Int(1, help="The row's rank, from 1.").tag(sync=True)
