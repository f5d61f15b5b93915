"""A notebook that ran without a browser is opened where no kernel has its panels: each shows its picture."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbclient import NotebookClient

from browser.notebook_page import eventually

START = """import os, tempfile
os.environ["SHARDSCOPE_RUNS"] = tempfile.mkdtemp()
import shardscope as ss
import shardscope_widgets as sw
job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=8)
run = ss.launch(job).wait(120)"""
CELLS = (
    START,
    "sw.MemoryCalculator()",
    "sw.CommunicationCalculator()",
    "sw.PipelineExplorer()",
    'sw.Planner(model="gpt3-175b", nodes=16, global_batch=256)',
    "sw.StepPlayer(run)",
    "sw.TrainingLab()",
    "sw.FaultLab(run)",
    "lab = sw.TuningLab(job, trials=2)\nlab",
    "lab.start()\nlab.wait(120)",
    "twin = sw.Twin(run)\ntwin",
    "twin.wait(60)",
)
PANELS = 9
MOST_BYTES = 400_000
"""Size of the notebook without the state of its widgets, which JupyterLab does not save by default."""
MOST_STATE = 5_500_000
"""Size of the state of its widgets, which nbclient saves: Plotly's script, compressed, is half of it."""
IMAGES = """() => [...document.querySelectorAll('.ss-still')].filter(node => node.checkVisibility()).map(node =>
    [...node.querySelectorAll('img')].filter(image => image.naturalWidth > 300 && image.clientWidth > 300).length)"""
TRUST = """() => {
    for (const cell of jupyterapp.shell.currentWidget.content.model.cells)
        if (cell.type === 'code') cell.trusted = true;
}"""
SHOWN = """() => [...document.querySelectorAll('.jp-OutputArea-output')].filter(node => node.checkVisibility()
    && getComputedStyle(node).fontSize !== '0px').map(node => node.innerText).join('\\n')"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The notebook as nbclient and `jupyter nbconvert --execute` leave it, without the state of its widgets."""
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    NotebookClient(written, timeout=240, kernel_name="python3").execute()
    assert len(json.dumps(written.metadata.pop("widgets"))) < MOST_STATE
    path = tmp_path_factory.mktemp("saved") / "saved.ipynb"
    nbformat.write(written, path)
    assert path.stat().st_size < MOST_BYTES
    return path


@pytest.mark.parametrize("is_trusted", [False, True])
def test_each_panel_of_a_saved_notebook_shows_its_picture(notebook, saved, is_trusted):
    page = notebook.page
    page.set_viewport_size({"width": 1200, "height": 9000})
    notebook.open(saved)
    if is_trusted:
        page.evaluate(TRUST)

    def all_are_seen():
        images = (
            page.evaluate(IMAGES)
            if is_trusted
            else page.evaluate(IMAGES.replace(".ss-still", ".jp-OutputArea"))
        )
        assert len([count for count in images if count]) == PANELS

    eventually(page, all_are_seen)
    shown = page.evaluate(SHOWN)
    assert "children=" not in shown
    assert "GiB to spare" in shown
    assert "has finished: step 8 of 8" in shown
    assert "A step took" in shown
    if is_trusted:  # else its style is removed, with which it would be shown
        page.wait_for_function(f"() => ({SHOWN})().includes('run this cell to use the panel')")
        assert "Error displaying widget" not in page.evaluate(SHOWN)
    notebook.console_errors[:] = [text for text in notebook.console_errors if "model not found" not in text]


def test_the_live_panel_hides_its_picture(notebook, saved, tmp_path):
    written = nbformat.read(saved, 4)
    written.cells = [nbformat.v4.new_code_cell("import shardscope_widgets as sw\nsw.PipelineExplorer()")]
    nbformat.write(written, tmp_path / "live.ipynb")
    notebook.open(tmp_path / "live.ipynb").run_all()
    page = notebook.page
    page.wait_for_selector(".ss-explorer .js-plotly-plot .main-svg")
    assert page.locator(".ss-still").count() == 1
    assert not page.locator(".ss-still").is_visible()
    assert not page.locator(".ss-fallback").is_visible()
