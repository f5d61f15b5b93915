"""The Binder image, without docker: repo2docker renders its recipe, and the recipe is read."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"


@pytest.fixture(scope="module")
def builder() -> Iterator[Any]:
    """The build pack that repo2docker chooses for this repository."""
    app = pytest.importorskip("repo2docker.app", reason="needs jupyter-repo2docker").Repo2Docker()
    with contextlib.chdir(ROOT):
        chosen = next(pack for pack in (kind(app.base_image) for kind in app.buildpacks) if pack.detect())
        chosen.platform = "linux/amd64"  # what mybinder.org builds for, whatever runs this test
        yield chosen


@pytest.fixture(scope="module")
def recipe(builder: Any) -> str:
    """The Dockerfile that Binder would build."""
    return builder.render(build_args={})


def test_the_recipe_takes_python_3_12(builder: Any) -> None:
    assert type(builder).__name__ == "PythonBuildPack"
    assert any("environment.py-3.12" in name for name in builder.get_build_script_files())


def test_the_recipe_installs_the_project_with_its_pins(recipe: str) -> None:
    install = recipe.index('pip install --no-cache-dir -r "binder/requirements.txt"')
    assert install > recipe.index("COPY --chown=1000:1000 src/ "), "the sources are not there yet"
    lines = (BINDER / "requirements.txt").read_text().splitlines()
    assert {"-e .[fast]", "-c constraints.txt", "-r torch-cpu.txt"} <= set(lines)


def test_torch_is_pinned_and_comes_from_the_cpu_index() -> None:
    torch = (BINDER / "torch-cpu.txt").read_text()
    assert torch.count("download.pytorch.org/whl/cpu") == 1
    assert re.search(r"^torch==\d+\.\d+\.\d+$", torch, re.MULTILINE)


def test_the_recipe_runs_our_scripts(recipe: str) -> None:
    assert "./binder/postBuild" in recipe
    assert "binder/start" in recipe


@pytest.mark.parametrize("script", ["postBuild", "start"])
def test_scripts_can_be_run_and_are_valid_shell(script: str) -> None:
    path = BINDER / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", path], check=True, timeout=100)


def test_post_build_stops_at_the_first_error() -> None:
    commands = [line for line in (BINDER / "postBuild").read_text().splitlines() if not line.startswith("#")]
    assert commands[0] == "set -e"


def test_start_hands_over_to_the_server_with_one_thread_a_process() -> None:
    command = [str(BINDER / "start"), "sh", "-c", "echo $OMP_NUM_THREADS $1", "sh", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "1 a b\n"
    assert (BINDER / "start").read_text().rstrip().endswith('exec "$@"')


def test_nothing_overrides_the_requirements() -> None:
    assert not (BINDER / "environment.yml").exists()
    assert not (BINDER / "Dockerfile").exists()


def test_every_badge_opens_something_that_exists() -> None:
    badges = re.findall(r"https://mybinder\.org/v2/\S+?urlpath=([^)\s]+)", (ROOT / "README.md").read_text())
    assert badges
    for target in badges:
        assert (ROOT / unquote(target).removeprefix("lab/tree/")).is_file(), f"{target} does not exist"
