"""Bytecode for the page's Python: half of the time that it needed to open a panel went into compiling modules.

Bytecode is of one version of Python, so Pyodide itself compiles, in the JavaScript runtime that Playwright brings.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import playwright
from recorded import PANELS

NODE = Path(playwright.__file__).with_name("driver") / "node"


def add_bytecode(bundle: Path, pyodide: Path) -> None:
    """Add to the page's `bundle` the bytecode of all modules that its panels import.

    Paths in the bundle then begin at the root of the worker's files, as Pyodide's own packages get bytecode too.

    Args:
        bundle: Archive of the page's Python code, which is written anew.
        pyodide: Folder of Pyodide's files.
    """
    script = Path(__file__).with_suffix(".mjs")
    subprocess.run([NODE, script, pyodide, bundle, json.dumps([*PANELS.values()])], check=True, timeout=300)
