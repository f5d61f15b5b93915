"""One run of each notebook serves all tests, also those of other workers.

Its kernel finds a warm process, as kernels of JupyterLab do, so that only one process per worker imports torch for all
launch servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import nbformat
import pytest
from filelock import FileLock

from notebooks.running import FOLDER, run, shared_folder
from shardscope.runtime.launcher import warm
from shardscope.runtime.launcher.driver_server import search_path


@pytest.fixture(scope="session")
def warm_process() -> Iterator[str]:
    """The folder of a warm process, which kernels take from the environment."""
    process = warm.start(search_path())
    place = os.environ.pop(warm.VARIABLE, "")
    yield place
    if process is not None:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # it reads the end of its input only after it has imported torch
            process.kill()
            process.wait()
            shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def executed(tmp_path_factory, monkeypatch, request) -> Callable[[str], nbformat.NotebookNode]:
    """Return a notebook by its name, run from start to end."""
    shared = shared_folder(tmp_path_factory, "notebooks")

    def once(name: str) -> nbformat.NotebookNode:
        done = shared / f"{name}.ipynb"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                place = request.getfixturevalue("warm_process")
                folder = shared / name
                folder.mkdir(exist_ok=True)
                monkeypatch.setenv("SHARDSCOPE_RUNS", str(folder / "runs"))
                monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
                if place:  # Linux only
                    monkeypatch.setenv(warm.VARIABLE, place)
                as_it_is = request.config.getoption("--every-case")
                nbformat.write(run(FOLDER / f"{name}.ipynb", folder, as_it_is=as_it_is), done)
        return nbformat.read(done, as_version=4)

    return once
