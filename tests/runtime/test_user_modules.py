"""What lies in the current folder is not run, unless the user's own code asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUNS = """
    import shardscope as ss
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=3)
    print(ss.launch(job).wait(100).state)
"""
USES_MODULES = """
    import sys
    sys.path.insert(0, "")  # as in a notebook
    import beside, wave
    assert wave.MINE
    import shardscope as ss
    def make_data():
        import later
        return later.make_data()
    for model in (beside.make_model, wave.make_model):
        job = ss.Job(model=model, data=make_data, strategy="ring", world_size=2, steps=3)
        print(ss.launch(job).wait(100).state)
"""
MODEL = """
MINE = True
def make_model():
    import torch
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
"""
DATA = """
def make_data():
    import torch
    x, y = torch.randn(128, 4), torch.randint(3, (128,))
    return (x, y), (x[:32], y[:32])
"""
THIRD_PARTY = (
    "torch",
    "numpy",
    "psutil",
    "cloudpickle",
    "pydantic",
    "sklearn",
    "shardscope",
    "optuna",
    "numba",
)
HOOKS = ("sitecustomize", "usercustomize")

_TRACE = """
import shardscope as ss
from shardscope.prediction.traced import traced
traced(ss.Job(model="mlp", data="digits"))
"""


def trap(folder: Path, marks: Path) -> None:
    """Modules that leave a mark when they are imported, under every name that an interpreter may ask for."""
    marks.mkdir()
    for name in {*sys.stdlib_module_names, *THIRD_PARTY, *HOOKS}:
        mark = marks / name
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('trapped')\n")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def script(path: Path, text: str) -> list[str]:
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    return [sys.executable, str(path)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "current"
    path.mkdir()
    return path


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["script", "command", "tuning"])
def test_nothing_in_the_current_folder_is_run(way: str, folder: Path, tmp_path: Path) -> None:
    trap(folder, tmp_path / "marks")
    command = {
        "script": script(tmp_path / "elsewhere.py", RUNS),
        "command": [
            str(Path(sys.executable).with_name("shardscope")),
            "run",
            "--model",
            "mlp",
            "--steps",
            "3",
        ],
        "tuning": [sys.executable, "-P", "-c", _TRACE],
    }[way]
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "marks").iterdir()) == []


def test_modules_beside_the_notebook_are_found_also_those_named_like_a_librarys(
    folder: Path, tmp_path: Path
) -> None:
    trap(folder, tmp_path / "marks")
    for name in ("beside", "wave"):
        (folder / f"{name}.py").write_text(MODEL)
    (folder / "later.py").write_text(DATA)
    text = USES_MODULES.replace(
        "import sys\n",
        "import sys, shardscope.runtime.launcher.driver, shardscope.runtime.launcher.preflight\n",
        1,
    )
    done = run(script(tmp_path / "elsewhere.py", text), folder)
    assert done.stdout.split() == ["completed"] * 2, done.stdout + done.stderr
    assert list((tmp_path / "marks").iterdir()) == []
