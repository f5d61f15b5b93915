"""Build the web page: the calculators and the planner in a browser, without a server or an installation.

    python notebooks/web/build.py --out build/web
    python -m http.server --directory build/web

The page is a folder of static files. Pyodide runs Shardscope's own code in a worker, so every number comes from the
functions that a notebook calls; Jupyter's own front end shows the widgets. `--notebooks` also runs the notebooks named
and puts them beside the page. The guide and the reference are in `reference/`. A broken link is an error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from bundle import folder_of, write_bundle
from links import broken_links
from memory import write_memory
from pyodide_files import PINS, PyodideMissing, fetch
from recorded import write_recorded
from reference import SphinxFailed, write_reference
from steps import write_steps

HERE = Path(__file__).parent
FRONT_END = {
    "widgets.js": ("widgetsnbextension", "static/extension.js"),
    "anywidget.js": ("anywidget", "nbextension/index.js"),
    "plotly.min.js": ("plotly", "package_data/plotly.min.js"),
    "images.js": ("shardscope_widgets", "kit/images.js"),
}


class BrokenLinks(Exception):
    """Links of the built site that lead nowhere."""


def build(out: Path, *, pyodide: Path, notebooks: list[Path] | None = None) -> Path:
    """Write the page to `out`, which is emptied first, and return it.

    Args:
        out: Folder of the page.
        pyodide: Folder in which Pyodide's files are kept between builds; those missing are downloaded.
        notebooks: Notebooks to run and show.

    Raises:
        BrokenLinks: A page leads to what the site does not have.
    """
    files = fetch(pyodide)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(HERE / "site", out, ignore=shutil.ignore_patterns("python"))
    shutil.copytree(files, out / "pyodide")
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle.zip"
        write_bundle(bundle)
        write_recorded(bundle, out / "recorded")
        write_memory(bundle, out)
    (out / "vendor").mkdir()
    for name, (package, path) in FRONT_END.items():
        shutil.copy(folder_of(package) / path, out / "vendor" / name)
    steps = write_steps(out / "steps")
    about = {
        "versions": _versions(),
        "steps": steps,
        "notebooks": _rendered(notebooks or [], out / "notebooks"),
    }
    (out / "about.json").write_text(json.dumps(about), encoding="utf-8")
    write_reference(out / "reference", {path.stem for path in notebooks or []})
    if broken := broken_links(out):
        raise BrokenLinks("\n".join(broken))
    return out


def _versions() -> str:
    return f"Shardscope {version('shardscope')}, Pyodide {PINS['version']}, plotly {version('plotly')}."


def _rendered(notebooks: list[Path], folder: Path) -> list[dict[str, str]]:
    if not notebooks:
        return []
    from rendered import render

    return render(notebooks, folder)


def main() -> None:
    """Build the page from the command line."""
    parser = argparse.ArgumentParser(description="Build the web page of the calculators.")
    parser.add_argument("--out", type=Path, default=Path("build/web"), help="folder of the page (build/web)")
    parser.add_argument(
        "--pyodide",
        type=Path,
        default=Path("build/pyodide"),
        help="folder that keeps Pyodide's files (build/pyodide)",
    )
    parser.add_argument("--notebooks", type=Path, nargs="*", default=[], help="notebooks to run and show")
    asked = parser.parse_args()
    try:
        out = build(asked.out, pyodide=asked.pyodide, notebooks=asked.notebooks)
    except (PyodideMissing, SphinxFailed, BrokenLinks) as error:
        sys.exit(str(error))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
