"""Milliseconds from a key press on a slider to the changed pixels, in Chromium, for each calculator.

A press counts from the page's `keydown` event to the frame that shows the redrawn result: the first change of that part
of the panel that follows the press, and the animation frame after it. Run it as
``python tests/benchmarks/page_latency.py [presses] [panel ...]``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

import nbformat

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests

from playwright.sync_api import sync_playwright

from browser.chromium import chromium
from browser.lab_server import jupyter_server
from browser.notebook_page import NotebookPage

PANEL = ".jp-OutputArea-output .ss-lab"
PANELS = {
    "memory": ("MemoryCalculator(zero=1)", "Data ranks", ".js-plotly-plot"),
    "communication": ("CommunicationCalculator()", "Message", ".js-plotly-plot"),
    "pipeline": ("PipelineExplorer(stages=4, microbatches=8)", "Micro-batches", ".js-plotly-plot"),
    "planner": ('Planner(model="gpt3-175b", nodes=128)', "Memory left", ".ss-plan-scroll"),
}
"""By name: the code of the panel, a slider's name, and the part of the results that must change."""
MEASURE = """(part) => {
    const started = new Promise(resolve => window.addEventListener(
        'keydown', event => resolve(event.timeStamp), { capture: true, once: true }));
    window.ssShown = new Promise(resolve => {
        const watch = new MutationObserver(changes => {
            const places = changes.map(({ target }) => target.closest ? target : target.parentElement);
            if (!places.some(place => place?.closest(part))) return;
            watch.disconnect();
            requestAnimationFrame(() => setTimeout(async () => resolve(performance.now() - await started)));
        });
        watch.observe(document.querySelector('.ss-lab'), {
            subtree: true, childList: true, characterData: true, attributes: true });
        setTimeout(() => { watch.disconnect(); resolve(null); }, 3000);
    });
}"""
KEYS = ["ArrowRight"] * 3 + ["ArrowLeft"] * 3


def press_times(page: NotebookPage, slider: str, part: str, presses: int) -> list[float]:
    """Press keys on a slider, back and forth, and return the times of those that changed the results."""
    page.page.locator(PANEL).get_by_role("slider", name=slider).focus()
    times = []
    for number in range(presses + len(KEYS)):
        page.page.evaluate(MEASURE, part)
        page.page.keyboard.press(KEYS[number % len(KEYS)])
        took = page.page.evaluate("() => window.ssShown")
        page.page.wait_for_timeout(150)  # the page and the kernel come to rest
        if took is not None and number >= len(KEYS):
            times.append(took)
    return times


def measure(context: object, server: object, folder: Path, name: str, presses: int) -> str:
    """Open one panel in a fresh notebook and return its line of the report."""
    code, slider, part = PANELS[name]
    cell = f"from shardscope_widgets import {code.split('(')[0]}\npanel = {code}\npanel"
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, folder / f"{name}.ipynb")
    page = NotebookPage(context.new_page(), server)
    try:
        page.open(folder / f"{name}.ipynb").run_all()
        page.page.wait_for_selector(f"{PANEL} .js-plotly-plot .main-svg", timeout=60_000)
        page.page.wait_for_timeout(2000)
        times = press_times(page, slider, part, presses)
    finally:
        page.shut_down()
    spread = quantiles(times, n=10)
    shown = f"10 to 90 %: {spread[0]:.1f} to {spread[-1]:.1f} ms, {len(times)} presses"
    return f"{name:<14} median {median(times):6.1f} ms, {shown}"


def main(presses: int = 30, *names: str) -> None:
    """Print the median and spread of each panel."""
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        jupyter_server(Path(folder) / "jupyter") as server,
        chromium(playwright, Path(folder) / "profile") as context,
    ):
        for name in names or PANELS:
            print(measure(context, server, Path(folder), name, presses), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
