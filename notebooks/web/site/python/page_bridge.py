"""Runs in the page's worker: connects the widgets to the page, as a kernel connects them to a notebook.

`connect` replaces the transport of `comm`: what a widget sends goes to `post`, a function of the worker, as JSON and
binary buffers. `deliver` hands a message of the page to its widget. `open_panel` creates a widget of
`shardscope_widgets` by name.

Comms are numbered, by panel, instead of having random identifiers: so a panel opened here has the identifiers that it
had when the page was built, and the page can show the messages recorded then until this process has started.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import comm
from comm.base_comm import BaseComm

_kept: list[Any] = []
"""The open widgets, which live as long as the page."""
_opening = "page"
"""Name of the panel opened last."""
_numbers: Counter[str] = Counter()
"""How many comms were created, by panel."""


def connect(post: Callable[[str, list[Any]], None]) -> None:
    """Send all messages of widgets through `post(text, buffers)`."""

    class PageComm(BaseComm):
        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_keys: Any
        ) -> None:
            message = {
                "type": msg_type,
                "comm_id": self.comm_id,
                "data": data or {},
                "metadata": metadata or {},
            }
            post(
                json.dumps(message, allow_nan=False, default=_plain),
                [memoryview(each) for each in buffers or ()],
            )

    def create_comm(**settings: Any) -> PageComm:
        _numbers[_opening] += 1
        return PageComm(**{"comm_id": f"{_opening}-{_numbers[_opening]}", **settings})

    comm.create_comm = create_comm


def deliver(comm_id: str, text: str, buffers: Sequence[Any] = ()) -> None:
    """Hand a message of the page to the widget whose comm has this identifier."""
    found = comm.get_comm_manager().comms.get(comm_id)
    if found is not None:
        content = {"comm_id": comm_id, "data": json.loads(text)}
        found.handle_msg({"content": content, "buffers": [each.to_py() for each in buffers]})


def open_panel(name: str, settings: str) -> str:
    """Create a widget of `shardscope_widgets` and return the identifier of its model.

    Args:
        name: Name of the class, such as ``MemoryCalculator``.
        settings: Keyword arguments for it, as a JSON object.
    """
    global _opening  # noqa: PLW0603 - a worker is one page
    import plotly.graph_objects as go

    import shardscope_widgets
    from shardscope_widgets.kit.live_figure import LiveFigure

    if not _kept:  # what all figures share is numbered as the page's, whichever panel opens first
        _kept.append(LiveFigure(go.Figure()))
    _opening = name
    panel = getattr(shardscope_widgets, name)(**json.loads(settings))
    _kept.append(panel)
    return str(panel.model_id)


def warm(names: Sequence[str]) -> None:
    """Open and close the panels `names`: then all that they import is in memory, and no widget."""
    global _opening  # noqa: PLW0603 - a worker is one page
    from ipywidgets import Widget

    from shardscope_widgets.kit import live_figure

    connect(lambda _text, _buffers: None)
    for name in names:
        open_panel(name, "{}")
        Widget.close_all()
        live_figure._library.cache_clear()  # noqa: SLF001 - the widget that all figures share
        _kept.clear()
        gc.collect()
    _numbers.clear()
    _opening = "page"


def picture() -> str:
    """Return a picture of the panel opened last, as HTML: its title, its verdict, and its results below where they are.

    It is a section without its tags, so that the page can add attributes.
    """
    from shardscope_widgets.kit.frame import LAB_CSS
    from shardscope_widgets.kit.still import part_html

    panel = _kept[-1]
    own = (getattr(each, "_css", "") for each in _inside(panel))
    styles = dict.fromkeys(str(style).removeprefix(LAB_CSS) for style in own)
    frame, (verdict, *results) = panel.children[0], map(part_html, panel._kept())  # noqa: SLF001 - a panel has no other reader
    return (
        f'class="picture {" ".join(panel._dom_classes)}"><style>{"".join(styles)}</style>'  # noqa: SLF001
        f'<div class="ss-title"><b>{frame.title}</b><span>{frame.about}</span></div>{verdict}<div class="ss-main">'
        f'<div class="ss-left">Loading the controls …</div><div class="ss-right">{"".join(results)}</div></div>'
    )


def _inside(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _inside(child)


def _plain(value: Any) -> Any:
    """Return a NumPy value as plain numbers."""
    return value.tolist()
