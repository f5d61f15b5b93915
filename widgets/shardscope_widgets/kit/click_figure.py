"""A live figure whose points can be clicked."""

from __future__ import annotations

import traitlets as t

from shardscope_widgets.kit.live_figure import LiveFigure

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
    """A live figure; `clicked` is the `customdata` (an integer) of the last point clicked, -1 before a click."""

    _esm = LiveFigure._esm.replace("export default { render };", _ON_CLICK)  # noqa: SLF001
    clicked = t.Int(-1).tag(sync=True)
