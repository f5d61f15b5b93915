"""Seconds from Run All in the tour to the first curve that grows, in JupyterLab in Chromium.

    python tests/benchmarks/first_curve.py [rounds]

Each round opens the notebook anew, as a new user does: with a kernel of its own, without earlier runs, and with two
clicks, Run and Run All Cells. The first round also fills the caches of this user, and Python's of compiled modules, and
is not counted. Beside it stand the times at which cells have finished.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from math import inf
from pathlib import Path
from statistics import median

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium
from browser.lab_server import jupyter_server
from browser.notebook_page import NotebookPage

TOUR = Path(__file__).parents[2] / "notebooks" / "01-tour.ipynb"
WATCH = """() => {
    const start = performance.now(), seen = {}, points = new Map();
    window.seen = seen;
    const look = () => {
        const now = (performance.now() - start) / 1000;
        document.querySelectorAll('.jp-CodeCell').forEach((cell, number) => {
            const prompt = cell.querySelector('.jp-InputPrompt')?.textContent ?? '';
            if (/\\d/.test(prompt)) seen[`cell ${number + 1}`] ??= now;
        });
        for (const plot of document.querySelectorAll('.js-plotly-plot')) {
            const drawn = (plot.data ?? []).reduce((sum, trace) => sum + (trace.x?.length ?? 0), 0);
            if (points.has(plot) && drawn > 1 && drawn > points.get(plot)) seen.curve ??= now;
            else seen.figure ??= now;
            points.set(plot, drawn);
        }
        if (!seen.curve) requestAnimationFrame(look);
    };
    look();
}"""


def first_curve(notebook: NotebookPage) -> dict[str, float]:
    """Run all cells and return when what was first seen, in seconds."""
    page = notebook.page
    page.wait_for_timeout(3000)  # until JupyterLab has done what it does after it has opened a notebook
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.evaluate(WATCH)
    page.get_by_text("Run All Cells", exact=True).click()
    with suppress(PlaywrightError):  # on a busy machine the run may end before its figure is drawn
        page.wait_for_function("() => window.seen.curve", timeout=30_000)
    seen: dict[str, float] = page.evaluate("() => window.seen")
    return seen


def main(rounds: int = 5) -> None:
    """Print each round and the median."""
    taken = []
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as on a user's machine
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        jupyter_server(Path(folder) / "jupyter") as server,
        chromium(playwright, Path(folder) / "profile") as context,
    ):
        for number in range(rounds + 1):
            notebook = NotebookPage(context.new_page(), server)
            try:
                seen = first_curve(notebook.open(TOUR))
            finally:
                notebook.shut_down()
                shutil.rmtree(server.runs, ignore_errors=True)
            print(
                "  ".join(
                    f"{name} {at:.1f} s" for name, at in sorted(seen.items(), key=lambda item: item[1])
                ),
                flush=True,
            )
            if number:
                taken.append(seen.get("curve", inf))
    print(f"first curve that grows: median {median(taken):.1f} s of {rounds}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
