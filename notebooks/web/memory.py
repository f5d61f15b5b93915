"""The memory of the page's Python, with everything imported that its panels need: starting and importing took 5 s.

Pyodide itself opens the panels and writes its memory, in the JavaScript runtime that Playwright brings. Modules in it
need no file any more, except that fields of specs are described in the source of Shardscope.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

import playwright
from bundle import KINDS
from recorded import PANELS

NODE = Path(playwright.__file__).with_name("driver") / "node"
SITE = "lib/python3.14/site-packages"
LIBRARIES = (
    "pydantic_core/_pydantic_core",
    "numpy/_core/_multiarray_umath",
    "numpy/linalg/_umath_linalg",
)
"""The compiled modules that the panels import, in this order."""


def write_memory(bundle: Path, page: Path) -> None:
    """Write the memory and the files of the page's Python to `python/` in the folder `page`.

    Of the packages beside Pyodide there, the page loads the compiled modules that its panels import; the other files
    that a panel may ask for later are in `python/files.gz`.

    Args:
        bundle: Archive of the page's own Python code.
        page: Folder of the page, with Pyodide and its packages.
    """
    (page / "python").mkdir()
    libraries = [f"{SITE}/{name}.cpython-314-wasm32-emscripten.so" for name in LIBRARIES]
    with tempfile.TemporaryDirectory() as root:
        zipfile.ZipFile(bundle).extractall(Path(root) / "lib/page")
        for wheel in sorted((page / "pyodide").glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(root) / SITE, [*filter(_is_needed, archive.namelist())])
            wheel.unlink()
        for library in libraries:
            target = page / "pyodide" / library
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(root) / library).rename(target)
            (Path(root) / library).touch()  # Python looks for a file before it asks for a library
        asked = {
            "libraries": [f"/{library}" for library in libraries],
            "panels": [*PANELS.values()],
        }
        script = Path(__file__).with_suffix(".mjs")
        subprocess.run([NODE, script, page.resolve(), root, json.dumps(asked)], check=True, timeout=300)


def _is_needed(name: str) -> bool:
    return Path(name).suffix in {*KINDS, ".so"} - {".pyi"} and "/tests/" not in name
