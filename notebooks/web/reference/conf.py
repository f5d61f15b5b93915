"""Settings of Sphinx for the reference; `reference.py` writes its pages and runs it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from docutils import nodes
from sphinx.domains.python import PyXRefRole
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.inspect import signature, stringify_signature

from shardscope import __version__

ROOT = Path(__file__).parents[3]
SOURCES = "https://github.com/shardscope/shardscope/blob/main"

project, author, release = "Shardscope", "The Shardscope developers", __version__
copyright = author  # noqa: A001 - Sphinx's name
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "myst_parser",
]
myst_heading_anchors = 3

default_role = "name"
toc_object_entries_show_parents = "hide"
add_module_names = False
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
python_display_short_literal_types = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Class attributes", "params_style"), "Source"]

nitpicky = True
nitpick_ignore_regex = [
    ("py:class", ".*"),  # types of annotations, of which only the public ones have a page
    (
        "py:.*",
        "(?!shardscope).*",
    ),  # parameters, and names of Python and torch, whose inventories are not fetched
]

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "Shardscope"
html_static_path = ["reference.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html", "site.html", "sidebar/search.html",
        "sidebar/scroll-start.html", "sidebar/navigation.html", "sidebar/scroll-end.html",
    ]
}  # fmt: skip
html_css_files = ["reference.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1769b5", "color-brand-content": "#1769b5"},
    "dark_css_variables": {"color-brand-primary": "#6db3f2", "color-brand-content": "#6db3f2"},
}


def linkcode_resolve(_domain: str, info: dict[str, str]) -> str | None:
    """Return where the source of a documented name can be read."""
    try:
        found = resolve_name(f"{info['module']}:{info['fullname']}")
        found = inspect.unwrap(found.fget if isinstance(found, property) else getattr(found, "func", found))
        file = Path(inspect.getsourcefile(found) or "").relative_to(ROOT)
        return f"{SOURCES}/{file}#L{inspect.getsourcelines(found)[1]}"
    except (AttributeError, TypeError, ValueError, OSError):
        return None


def name_role(_name: str, raw: str, text: str, line: int, inliner: Any, **_more: Any) -> Any:
    """Show text between single backquotes as code, with a link where it is a name of ours."""
    full = re.sub(r"^ss\.", "shardscope.", text)
    if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", full):
        target = full.removesuffix("()")
        return PyXRefRole()("py:obj", raw, f"{text} <{target}>", line, inliner)
    return [nodes.literal(raw, text, classes=["code"])], []


def inner_name(_app: Any, _env: Any, node: Any, shown: Any) -> Any:
    """Show a name that exists but is not public without a link; one that does not exist is a broken reference."""
    target = node.get("reftarget", "")
    if not re.match(r"shardscope(_widgets)?\.", target):
        return None
    try:
        resolve_name(target)
    except (AttributeError, ImportError, ValueError):
        return None
    return shown


def init_signature(
    _app: Any, kind: str, _name: str, found: Any, _options: Any, _text: Any, _returned: Any
) -> tuple[str, None] | None:
    """Return the arguments of a class's own `__init__` where autodoc would show those of an inherited `__new__`."""
    if kind != "class" or "__init__" not in vars(found) or found.__new__ is object.__new__:
        return None
    own = signature(found.__init__, bound_method=True)
    return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), None


def keep_bars(_app: Any, _kind: str, _name: str, _found: Any, _options: Any, lines: list[str]) -> None:
    """Escape the bars of norms such as |x|, which reStructuredText takes for substitutions; code keeps them."""
    parts = re.split(r"(`+[^`]*`+|^ *(?:>>>|\.\.\.).*$)", "\n".join(lines), flags=re.MULTILINE)
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")


# Napoleon takes "Size: in bytes" below an attribute for a type and a text; ours is a sentence with a colon.
GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end  # noqa: SLF001


def setup(app: Any) -> None:
    """Register the role, and what is done to docstrings."""
    app.add_role("name", name_role)
    app.connect("missing-reference", inner_name)
    app.connect("autodoc-process-signature", init_signature)
    app.connect("autodoc-process-docstring", keep_bars)
