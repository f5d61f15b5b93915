"""The heading of a lab, which also loads its style sheet."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t

_ESM = """
function render({ model, el }) {
  el.innerHTML = '<div class="ss-title"><b></b><span></span></div>';
  const [title, about] = el.querySelectorAll("b, span");
  title.textContent = model.get("title");
  about.textContent = model.get("about");
}
export default { render };
"""
LAB_CSS = files(__package__).joinpath("lab.css").read_text(encoding="utf-8")
"""Style sheet of all widgets with the CSS class ``ss-lab``."""


class Frame(anywidget.AnyWidget):
    """A title with a one-line description."""

    _esm = _ESM
    _css = LAB_CSS
    title = t.Unicode("").tag(sync=True)
    about = t.Unicode("").tag(sync=True)
