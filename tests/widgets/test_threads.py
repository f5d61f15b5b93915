"""Threads of panels: none of them is the first to import a module that figures look for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardscope_widgets

ROOT = Path(shardscope_widgets.__file__).parent
KIT = "from shardscope_widgets.kit"
STARTS = {
    "a panel's work": f"{KIT}.background import Background\npanel = Background()\npanel._start(work, name='t')",
    "a lab's clock": (
        f"{KIT}.clock import Clock\nclass Lab:\n    def beat(self):\n        work()\n        return False\n"
        "lab = Lab()\nClock(lab.beat, interval_s=0.001).start()"
    ),
    "anything else": f"{KIT}.threads import panel_thread\npanel_thread(work, name='t').start()",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", STARTS)
def test_a_figure_can_be_made_while_a_thread_imports_what_figures_look_for(start: str) -> None:
    """In a new process, in which a thread that imports pandas needs about a second for it."""
    code = (
        f"import time\nimport plotly.graph_objects as go\ndef work():\n    import pandas\n{STARTS[start]}\n"
        "for _ in range(100):\n    go.Scatter(x=[1, 2], y=[1, 2])\n    time.sleep(0.003)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_a_process_ends_when_the_work_of_its_panels_has_ended() -> None:
    """A thread that the interpreter stops inside torch would abort it."""
    start = STARTS["a panel's work"]
    code = f"import time\ndef work():\n    time.sleep(1)\n    print('done')\n{start}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "done\n"


def test_all_threads_of_panels_are_started_in_one_place() -> None:
    places = [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if "threading.Thread(" in path.read_text()
    ]
    assert places == ["kit/threads.py"]
