"""The heading of a lab, which also shows a banner when the lab's kernel is gone, and makes the lab accessible."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from importlib.resources import files
from math import isclose
from typing import Any

import anywidget
import traitlets as t

LAB_CSS = files(__package__).joinpath("lab.css").read_text(encoding="utf-8")
"""Style sheet of all widgets with the CSS class ``ss-lab``."""
GONE = "Kernel restarted; run this cell again."
"""Text that a lab shows once its kernel has been restarted or has died. Runs end with the kernel, unless launched with
``detach=True``; the new lab shows all runs, and offers to resume those that have ended."""


class Frame(anywidget.AnyWidget):
    """A lab's title and one-line description, and a banner once the lab's kernel is gone."""

    _esm = "".join(
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("refused.js", "keys.js", "access.js", "copy.js", "frame.js")
    )
    _css = LAB_CSS
    title = t.Unicode("").tag(sync=True)
    about = t.Unicode("").tag(sync=True)
    gone = t.Unicode(GONE).tag(sync=True)
    subject = t.Unicode(
        help="What the lab shows, such as a model or a run; names the files of saved images."
    ).tag(sync=True)
    panel = t.Unicode(help="Class of the panel that can be copied; empty if it cannot.").tag(sync=True)
    settings = t.Dict(help="The panel's traits that differ from their defaults.").tag(sync=True)
    code = t.Unicode(help="Python code that opens the panel with these settings.").tag(sync=True)

    def offer_copy(self, panel: t.HasTraits, names: Sequence[str], *, together: Collection[str] = ()) -> None:
        """Offer to copy a panel as code, and in the web page as a link, with its current settings.

        Args:
            panel: The panel.
            names: Traits that its class takes as arguments.
            together: Traits that are all copied if any of them differs from its default.
        """
        defined = [name for base in reversed(type(panel).__mro__) for name in vars(base)]
        defaults = {name: panel.trait_defaults(name) for name in sorted(names, key=defined.index)}

        def tell(_change: object = None) -> None:
            values = {name: getattr(panel, name) for name in defaults}
            changed = {name for name, value in values.items() if _differs(value, defaults[name])}
            changed |= set(together) if changed & set(together) else set()
            settings = {name: value for name, value in values.items() if name in changed}
            name = type(panel).__name__
            arguments = ", ".join(f"{field}={value!r}" for field, value in settings.items())
            with self.hold_sync():
                self.panel = name if _is_plain(settings) else ""
                self.settings = settings if self.panel else {}
                self.code = f"from shardscope_widgets import {name}\n\n{name}({arguments})"

        panel.observe(tell, list(names))
        tell()


def _is_plain(settings: dict[str, Any]) -> bool:
    """Return whether settings can be written as code and in a URL: a round trip through JSON leaves them unchanged."""
    try:
        return bool(json.loads(json.dumps(settings)) == settings)
    except (TypeError, ValueError):
        return False


def _differs(value: Any, default: Any) -> bool:
    """Return whether a setting differs from its default by more than the rounding of a logarithmic slider."""
    if isinstance(value, float) and isinstance(default, float):
        return not isclose(value, default)
    return bool(value != default)
