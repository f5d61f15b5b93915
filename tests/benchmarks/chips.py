"""Seconds from a press of each of the Training Lab's chips to a picture that moves, and to the measured step below it.

    python tests/benchmarks/chips.py [presses]

Each press is a click in Chromium on the chip of a lab that is open in JupyterLab; its run is stopped once enough steps
are measured. Printed are both times, the height of the player and the position of its play button in the window, the
predicted and the median measured time of a step with the difference between them, and the machine's load.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium
from browser.lab_server import jupyter_server
from browser.notebook_page import MODULES_MAY_TAKE_LONG, NotebookPage

LAB = ".jp-OutputArea-output .ss-lab"
CELL = "from shardscope_widgets import TrainingLab\nlab = TrainingLab()\nlab"
PRESS = """title => {
    const root = document.querySelector('.ss-step'), player = root.parentNode.player, old = player.model.get('events');
    const start = performance.now(), seen = window.seen = {};
    let last = -1;
    const look = () => {
        const now = (performance.now() - start) / 1000, model = player.model;
        if (model.get('events') !== old) seen.shown ??= now;
        if (model.get('playing') && last >= 0 && model.get('position') > last) seen.moving ??= now;
        last = seen.shown ? model.get('position') : -1;
        if (seen.shown && model.get('measured').events?.length) seen.measured ??= now;
        if (!seen.measured) requestAnimationFrame(look);
    };
    [...document.querySelectorAll('.ss-presets button')].find(b => b.textContent === title).click();
    look();
}"""
PLACE = """() => {
    const root = document.querySelector('.ss-step'), box = root.getBoundingClientRect();
    const play = root.querySelector('.play').getBoundingClientRect();
    return [Math.round(box.height), 0 < play.top && play.bottom < innerHeight];
}"""
STEPS = "(lambda t: [len(t), sorted(t)[len(t) // 2] if t else 0])([s.step_time_s for s in lab._focus_trace().steps])"
LEAST_STEPS = 8


def press(notebook: NotebookPage, title: str) -> dict[str, Any]:
    """Press a chip, and return what was seen and measured."""
    page = notebook.page
    page.evaluate(PRESS, title)
    page.wait_for_function("() => window.seen.measured", timeout=60_000)
    found: dict[str, Any] = page.evaluate("() => window.seen")
    found["height"], found["play in view"] = page.evaluate(PLACE)
    end = time.monotonic() + 60
    while (steps := notebook.kernel(STEPS))[0] < LEAST_STEPS and time.monotonic() < end:
        page.wait_for_timeout(200)
    found["step"], found["predicted"] = steps[1], notebook.kernel("lab.screen.player.step_events.step_time_s")
    notebook.kernel("[lab.run.stop().id, lab.stop()]")
    return found


def write(folder: Path) -> Path:
    """Write the notebook."""
    cell = {
        "cell_type": "code",
        "id": "lab",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": CELL,
    }
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    file = folder / "chips.ipynb"
    file.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": [cell]}))
    return file


def main(presses: int = 12) -> None:
    """Print each press, and how many were within the targets."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        jupyter_server(Path(folder) / "jupyter") as server,
        chromium(playwright, Path(folder) / "profile", {"width": 1400, "height": 1000}) as context,
    ):
        context.add_init_script(MODULES_MAY_TAKE_LONG)
        notebook = NotebookPage(context.new_page(), server)
        try:
            notebook.open(write(Path(folder))).run_all()
            notebook.page.wait_for_function(
                "() => document.querySelector('.ss-step')?.parentNode.player?.step"
            )
            titles = notebook.kernel("[b.description for b in lab.screen.presets.buttons]")
            for title in islice(cycle(titles), presses):
                found, load = press(notebook, title), os.getloadavg()[0]
                gap = found["step"] / found["predicted"] - 1
                rows.append((found["moving"], found["measured"], abs(gap)))
                print(
                    f"{title:30} moves {found['moving']:.2f} s  measured {found['measured']:.1f} s  "
                    f"predicted {1e3 * found['predicted']:.0f} ms  measured {1e3 * found['step']:.0f} ms ({gap:+.1%})  "
                    f"{found['height']} px, play in view: {found['play in view']}  load {load:.1f}",
                    flush=True,
                )
                notebook.page.wait_for_timeout(1500)
        finally:
            if shot := os.environ.get("SHOT"):
                notebook.page.screenshot(path=shot)
            notebook.shut_down()
    for name, column, most in (("picture moves", 0, 1.0), ("measured step", 1, 6.0), ("difference", 2, 0.08)):
        values = [row[column] for row in rows]
        within = sum(value <= most for value in values)
        print(f"{name}: median {median(values):.2f}, {within} of {len(values)} within {most:g}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
