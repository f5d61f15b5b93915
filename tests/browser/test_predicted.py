"""A person trains a job in the Training Lab and looks at what was predicted of it."""

from __future__ import annotations

import nbformat

from browser.notebook_page import eventually

LAB = ".jp-OutputArea-output .ss-lab"
CELL = """
from shardscope_widgets import TrainingLab
lab = TrainingLab(model="mlp", data="digits", strategy="zero-2", world_size=2, steps=20)
lab
"""
WIDER_THAN_ITS_PANEL = f"""() => [...document.querySelectorAll('{LAB} .ss-outcome, {LAB} .ss-outcome *')]
    .filter(node => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX === 'visible'
        && getComputedStyle(node).display !== 'inline').map(node => node.outerHTML.slice(0, 200))"""
IS_WHOLE = "table => table.parentElement.scrollWidth <= table.parentElement.clientWidth + 1"


def test_the_run_stands_beside_its_prediction_once_it_has_ended(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "compared.ipynb")
    notebook.open(tmp_path / "compared.ipynb").run_all()
    page = notebook.page
    page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("1")  # the cell has ended, so the lab no longer chooses a tab
    page.locator(LAB).get_by_role("tab", name="Predicted").click()
    page.locator(f"{LAB} .ss-words", has_text="Once the selected run has ended").wait_for()

    page.locator(f"{LAB} .ss-buttons button", has_text="Start").click()
    page.locator(f"{LAB} .ss-outcome summary", has_text="terms").click(timeout=180_000)
    table = page.locator(f"{LAB} .ss-outcome table")
    table.wait_for()
    told = table.inner_text()
    for term in ("ring_reduce_scatter", "parameters", "activations", "backward", "step"):
        assert term in told
    assert told.count("exact") >= 7
    bars = f"{LAB} .js-plotly-plot .barlayer .point"
    page.locator(bars).first.wait_for(timeout=60_000)
    num_bars = notebook.kernel(
        "sum(len(bar['x']) for bar in lab.screen.outcome.figure.traces) if lab.screen.outcome.found else 0"
    )
    page.wait_for_function(f"n => document.querySelectorAll('{bars}').length >= n", arg=num_bars)

    def nothing_is_wider_than_its_panel():
        assert page.evaluate(WIDER_THAN_ITS_PANEL) == []

    eventually(page, nothing_is_wider_than_its_panel)
    assert table.evaluate(IS_WHOLE), "its last columns, the errors, are seen without scrolling"
    assert notebook.kernel("[lab.problem, lab.screen.outcome.found.disagreeing]") == ["", []]
