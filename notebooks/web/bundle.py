"""The Python code of the page: Shardscope and the packages that its calculators import, as one archive.

The packages are those of the environment that builds the page, so the page runs the versions that a notebook runs.
Only pure Python goes in; compiled packages come from Pyodide (see `pyodide_files`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

OWN = ("shardscope", "shardscope_widgets")
LIBRARIES = ("ipywidgets", "traitlets", "comm", "anywidget", "psygnal", "plotly", "_plotly_utils", "narwhals")
TRACES = {"bar", "heatmap", "scatter", "layout"}
"""The parts of `plotly.graph_objs` that the panels' figures use; each trace has a folder of its own there."""
STAND_INS = Path(__file__).parent / "site" / "python"
"""Modules written for the page: the bridge to it, and what ipywidgets asks of IPython."""
LEFT_OUT = (
    "__pycache__", "tests", "labextension", "nbextension", "notebooks",
    "plotly/matplotlylib", "plotly/figure_factory", "plotly/data", "plotly/package_data/datasets",
    "plotly/package_data/widgetbundle.js",
    PLOTLY_JS := "plotly/package_data/plotly.min.js",
)  # fmt: skip
KINDS = {".py", ".pyi", ".json", ".css", ".js", ".jsonl", ".csv", ".txt", ".html"}


def write_bundle(target: Path) -> int:
    """Write the archive to `target` and return its size in bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in (*OWN, *LIBRARIES):
            folder = folder_of(name)
            for path in _files(folder):
                archive.write(path, path.relative_to(folder.parent).as_posix())
        for name in (OWN[0], *LIBRARIES):
            if not name.startswith("_"):  # a package names its version in its metadata, and some read it
                text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}\n"
                archive.writestr(f"{name}-{version(name)}.dist-info/METADATA", text)
        archive.writestr(PLOTLY_JS, "")  # the page loads it itself, while Python starts
        for path in _files(STAND_INS):
            archive.write(path, path.relative_to(STAND_INS).as_posix())
    return target.stat().st_size


def folder_of(package: str) -> Path:
    """Return the folder of an installed package."""
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} is not a folder"
    return Path(spec.origin).parent


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        name = f"{path.relative_to(folder.parent).as_posix()}/"
        if (
            path.is_file()
            and path.suffix in KINDS
            and not any(f"/{part}/" in f"/{name}" for part in LEFT_OUT)
            and not _is_of_other_trace(path)
        ):
            yield path


def _is_of_other_trace(path: Path) -> bool:
    folders = path.parts[:-1]
    return "graph_objs" in folders[:-1] and folders[folders.index("graph_objs") + 1] not in TRACES
