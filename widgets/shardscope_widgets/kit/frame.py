"""The heading of a lab, which also shows a banner when the lab's kernel is gone, and makes the lab accessible."""

from __future__ import annotations

from importlib.resources import files

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
        for name in ("refused.js", "access.js", "frame.js")
    )
    _css = LAB_CSS
    title = t.Unicode("").tag(sync=True)
    about = t.Unicode("").tag(sync=True)
    gone = t.Unicode(GONE).tag(sync=True)


def fallback_html(inner: str) -> str:
    """Return static output to show below a lab: `inner`, and the banner if a reloaded page has no lab to show.

    The banner's style hides it if the output above contains a lab, and delays it while a lab may still be loading.
    """
    rule = (
        ".ss-fallback{display:none}"
        ".jp-OutputArea:not(:has(.ss-lab)) .ss-fallback{display:block!important;"
        "animation:ss-late 0s 3s backwards;border-left:4px solid #c49a0c;padding:8px 12px}"
        ".jp-OutputArea:has(.ss-fallback):not(:has(.ss-lab)) .jp-OutputArea-output.jupyter-widgets{font-size:0}"
        "@keyframes ss-late{from{visibility:hidden}}"
    )
    return f'<style>{rule}</style><div class="ss-fallback" style="display:none">{GONE}</div>{inner}'
