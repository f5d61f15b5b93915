"""The page's archive of Python code is enough for the calculators, with the compiled packages that Pyodide brings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WEB = Path(__file__).parents[3] / "notebooks/web"
COMPILED = (
    "numpy", "numpy.libs", "pydantic", "pydantic_core", "annotated_types", "typing_extensions.py", "typing_inspection",
)  # fmt: skip
"""What `pyodide.json` pins, as it lies in an environment."""
CODE = """
import json, sys
sys.path = [path for path in sys.path if "site-packages" not in path] + sys.argv[1:]
import page_bridge
sent = []
page_bridge.connect(lambda text, buffers: sent.append(json.loads(text)))
for name in ("MemoryCalculator", "CommunicationCalculator", "PipelineExplorer", "Planner"):
    model = page_bridge.open_panel(name, "{}")
    assert any(message["comm_id"] == model for message in sent), name
"""


def module(name):
    sys.path.insert(0, str(WEB))  # its modules import each other
    spec = importlib.util.spec_from_file_location(f"web_{name}", WEB / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    module("bundle").write_bundle(folder / "bundle.zip")
    with zipfile.ZipFile(folder / "bundle.zip") as archive:
        archive.extractall(folder / "code")
    return folder


@pytest.mark.slow
def test_the_calculators_import_nothing_that_the_page_does_not_have(bundle, tmp_path):
    site_packages = Path(importlib.util.find_spec("numpy").origin).parents[1]
    for name in COMPILED:
        if (site_packages / name).exists():
            (tmp_path / name).symlink_to(site_packages / name)
    command = [sys.executable, "-S", "-c", CODE, bundle / "code", tmp_path]
    ran = subprocess.run([*map(str, command)], env={}, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_all_that_the_panels_import_is_in_the_memory_that_the_page_starts_with(built):
    """Pyodide opens every panel without importing a module."""
    script = WEB.parents[1] / "tests/notebooks/web/open_panels.mjs"
    ran = subprocess.run([module("memory").NODE, script, built], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "4 panels" in ran.stdout


@pytest.mark.slow
def test_the_memory_and_the_files_are_small_enough_to_wait_for(built):
    assert sum(path.stat().st_size for path in (built / "python").iterdir()) < 22.5e6


def test_a_file_that_is_not_the_pinned_one_is_refused(tmp_path):
    files = module("pyodide_files")
    with pytest.raises(files.PyodideMissing, match="pyodide.mjs is not the pinned file"):
        files._keep(tmp_path, {"pyodide.mjs": b"export const loadPyodide = steal;"})
    assert not (tmp_path / "pyodide.mjs").exists()
