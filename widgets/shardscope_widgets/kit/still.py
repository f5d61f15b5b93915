"""A picture of a panel below the panel itself, for a notebook that is read where no kernel runs.

A saved notebook shows no live widgets as a page of nbconvert, or in a new session of JupyterLab. So each panel
publishes, as a second output of its cell, what it currently shows: its texts, and its figures as SVG images. The output
is hidden while the live panel is in the page. It is text/html, which all of these viewers show. Its images are `img`
elements, because viewers remove inline SVG from notebooks that they do not trust, but keep images.
"""

from __future__ import annotations

import base64
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any
from weakref import WeakSet

import ipywidgets as widgets
from IPython import get_ipython
from IPython.display import display, update_display

from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.kit.live_figure import LiveFigure

PUBLISH_EVERY_S = 3.0
"""Minimum time between two updates of a picture during a run or while a slider moves, in seconds."""
SAVED = "A picture of this panel; run this cell to use the panel."
"""Text above the picture if a Jupyter page has no live panel, such as after a restart and a reload."""
_LOOK = (
    ".ss-still{max-width:900px}.ss-still img{max-width:100%}.ss-still .ss-status{font-weight:600;margin:.3em 0}"
    ".ss-still .ss-words,.ss-still .ss-note{margin:.3em 0}.ss-still .ss-numbers{display:flex;flex-wrap:wrap;"
    "gap:8px 28px}.ss-still .ss-numbers b{display:block;font-size:1.5em}"
)
_LOG = logging.getLogger("shardscope")
_shown: WeakSet[Still] = WeakSet()
"""Panels whose pictures are in a notebook."""


class Still:
    """Base of panels: publishes a picture of the panel whenever the panel is displayed in a notebook."""

    _display_id = ""
    _published = ""
    _timer: threading.Timer | None = None
    _is_behind = False
    _guard = Guard(lambda problem: _LOG.warning("a picture could not be drawn: %s", _text(problem)))
    """Replaced by panels that show their errors."""

    def _kept(self) -> Iterable[widgets.Widget | str]:
        """Return the parts of the panel that its picture shows: figures, texts, boxes of these, and HTML."""
        raise NotImplementedError

    def _still(self) -> str:
        """Return the picture of the panel as HTML."""
        return "".join(map(part_html, self._kept()))

    def _begin_showing(self) -> None:
        """Start the work that is needed only while the panel is displayed."""

    def _ipython_display_(self) -> None:
        self._display_id = self.model_id  # type: ignore[attr-defined] # which a closed panel no longer has
        self.add_class(f"ss-live-{self._display_id}")  # type: ignore[attr-defined]
        bundle = self._repr_mimebundle_()  # type: ignore[attr-defined]
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})  # anywidget's has metadata
        display(data, raw=True, metadata=metadata)
        self._begin_showing()
        with self._guard.run():
            self._published = self._still()
        display(self._bundle(), raw=True, display_id=self._display_id)
        shell = get_ipython()
        if self not in _shown and shell is not None:
            _shown.add(self)
            if _publish_all not in shell.events.callbacks["post_run_cell"]:
                shell.events.register("post_run_cell", _publish_all)
            self._watch()

    def _watch(self) -> None:
        """Observe changes of all parts that the picture shows."""
        with self._guard.lock:
            parts = [self, *_leaves(self._kept())]
        for part in parts:
            names = [name for name in ("value", "figure", "events") if part.has_trait(name)]
            if names:  # without names, all traits would be observed
                part.observe(self._fall_behind, names)

    def _publish(self) -> None:
        """Update the picture in the notebook if the panel has changed."""
        self._is_behind = False
        with self._guard.run():
            picture = self._still()
            if self._display_id and picture != self._published:
                self._published = picture
                update_display(self._bundle(), raw=True, display_id=self._display_id)

    def _fall_behind(self, _change: object) -> None:
        """Publish after a short delay, so that a moving slider is not slowed down."""
        if not self._is_behind:
            self._is_behind = True
            if self.comm is not None:  # type: ignore[attr-defined] # a closed panel waits for the end of the cell
                # No panel_thread: a picture imports no module, and a slider must not wait for an import of pandas.
                self._timer = threading.Timer(PUBLISH_EVERY_S, self._publish)
                self._timer.daemon = True
                self._timer.start()

    def _bundle(self) -> dict[str, str]:
        live, own = f".ss-live-{self._display_id}", f".ss-still-{self._display_id}"
        alone = (
            f".jp-OutputArea:has({own}):not(:has({live}))"  # has the picture of this panel, but not the panel
        )
        rules = (
            f".ss-fallback{{display:none}}{alone} .ss-fallback{{display:block!important;"
            "animation:ss-late 0s 3s backwards;border-left:4px solid #c49a0c;padding:8px 12px}"
            f"{alone} .jp-OutputArea-output.jupyter-widgets{{font-size:0}}"
            f"body:has({live}) {own}{{display:none}}"
            "@keyframes ss-late{from{visibility:hidden}}"
        )
        html = (
            f'<style>{rules}{_LOOK}</style><div class="ss-fallback" style="display:none">{SAVED}</div>'
            f'<div class="ss-still ss-still-{self._display_id}">{self._published}</div>'
        )
        return {"text/html": html, "text/plain": ""}

    def __repr__(self) -> str:
        headline = ""
        with self._guard.run():
            headline = next(filter(None, (_text(each) for each in self._kept())), "")
        return f"{type(self).__name__}: {headline}"


def _publish_all(*_result: Any) -> None:
    """Publish the changes that a cell made, without a timer: after the last cell of a notebook, none would run any
    more.
    """
    for panel in list(_shown):
        if panel._is_behind:  # noqa: SLF001
            panel._publish()  # noqa: SLF001


def _leaves(parts: Iterable[widgets.Widget | str]) -> Iterable[widgets.Widget]:
    for part in parts:
        if isinstance(part, widgets.Box):
            yield from _leaves(part.children)
        elif not isinstance(part, str):
            yield part


def part_html(part: widgets.Widget | str) -> str:
    """Return a part of a panel as HTML; empty for controls and hidden parts."""
    if isinstance(part, str):
        return part
    if getattr(part.layout, "display", None) == "none":
        return ""
    if isinstance(part, widgets.HTML):
        return str(part.value)
    if isinstance(part, LiveFigure):
        try:
            return image_html(part.svg(), part.label)
        except Exception:  # noqa: BLE001 - the other parts are still of use
            _LOG.warning("the figure %r is missing in a picture", part.label, exc_info=True)
            return ""
    return "".join(map(part_html, _inside(part)))


def _inside(box: widgets.Widget) -> Sequence[widgets.Widget]:
    """Return the visible children of a box; for tabs, only the one that is open."""
    parts = box.children if isinstance(box, widgets.Box) else ()
    return [parts[box.selected_index or 0]] if parts and isinstance(box, widgets.Tab) else parts


def image_html(svg: str, label: str = "") -> str:
    """Return an SVG document as an image; empty if there is none."""
    if not svg:
        return ""
    data = base64.b64encode(svg.encode()).decode()
    return f'<div><img alt="{escape(label or "figure")}" src="data:image/svg+xml;base64,{data}"></div>'


def _text(part: widgets.Widget | str) -> str:
    """Return the text of an HTML part on one line."""
    value = part if isinstance(part, str) else part.value if isinstance(part, widgets.HTML) else ""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", value))).strip()
