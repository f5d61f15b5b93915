"""Notebooks, run and written as pages beside the calculators, in the look of the page.

A Plotly figure is kept as JSON and drawn in the reader's browser, so it stays interactive. A widget needs Python: where
the page has a panel of the same class, a link to it takes the widget's place.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from string import Template
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

GITHUB = "https://github.com/shardscope/shardscope/blob/main/notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
PANELS = {
    "MemoryCalculator": "memory",
    "CommunicationCalculator": "communication",
    "PipelineExplorer": "pipeline",
    "Planner": "planner",
}
"""Address of the page's panel for a class of widgets."""
_FRAME = Template(Path(__file__).with_name("notebook.html").read_text(encoding="utf-8"))


def render(notebooks: list[Path], folder: Path) -> list[dict[str, str]]:
    """Run the notebooks, write each as a page in `folder`, and return their titles and file names."""
    written = []
    for path in notebooks:
        print(f"Running {path}", flush=True)
        title = write_page(run(path), path, folder, {each.stem for each in notebooks})
        written.append({"title": title, "file": f"{path.stem}.html"})
    return written


def write_page(notebook: Any, path: Path, folder: Path, rendered: Collection[str]) -> str:
    """Write the page of a notebook at `path` to `folder`, with the pictures that it shows, and return its title.

    Links to notebooks in `rendered` lead to their pages.
    """
    title, body = as_html(notebook, rendered)
    shutil.copytree(path.parent / "images", folder / "images", dirs_exist_ok=True)
    text = _FRAME.substitute(title=html.escape(title), body=body)
    (folder / f"{path.stem}.html").write_text(text, encoding="utf-8")
    return title


def run(path: Path) -> Any:
    """Return a notebook with the outputs of all its cells; its runs go to a temporary folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as runs:
        env = os.environ | {"SHARDSCOPE_RUNS": runs}
        client = NotebookClient(notebook, timeout=900, store_widget_state=False, coalesce_streams=True)
        client.resources = {"metadata": {"path": str(path.parent)}}
        client.execute(env=env)
    return notebook


def as_html(notebook: Any, rendered: Collection[str] = ()) -> tuple[str, str]:
    """Return the title of a notebook, which is its first heading, and its cells as HTML.

    Links to the notebooks in `rendered` lead to their pages, and links to others to the repository.
    """

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        return f'href="{name}.html' if name in rendered else f'href="{GITHUB}/{name}.ipynb'

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _put_html(output.get("data", {}))
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
    )
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(
        r'<a class="anchor-link".*?</a>', "", body
    )  # excluding them would drop the headings' ids, too
    heading = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.sub(r"^#+\s*|`", "", heading.splitlines()[0])
    return title, re.sub(r'href="([\w-]+)\.ipynb', linked, body)


def _put_html(data: dict[str, Any]) -> None:
    """Add to the data of an output the HTML of a figure, or of the link that replaces a widget."""
    if PLOTLY in data:
        figure = {part: data[PLOTLY].get(part, {}) for part in ("data", "layout")}
        text = json.dumps(figure).replace("<", "\\u003c")
        data["text/html"] = f'<div class="figure"><script type="application/json">{text}</script></div>'
    elif WIDGET in data:
        del data[WIDGET]
        name = data.get("text/plain", "").split("(")[0]
        link = (
            f'<a href="../#{PANELS[name]}">Open it here</a>'
            if name in PANELS
            else "Run the notebook to use it"
        )
        data["text/html"] = f'<p class="widget">{html.escape(name)}: an interactive widget. {link}.</p>'
