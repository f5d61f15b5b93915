"""A person breaks a rank from the Training Lab: it is named, the run recovers, and the lost steps are marked."""

from __future__ import annotations

import nbformat

from browser.notebook_page import eventually

LAB = ".jp-OutputArea-output .ss-lab"
CELL = """
from shardscope_widgets import TrainingLab
lab = TrainingLab(model="mlp", data="digits", strategy="zero-2", world_size=3, global_batch=48, steps=100_000,
                  checkpoint_every=50, restarts=3)
lab
"""
KEYS = f"""() => [...document.querySelectorAll('{LAB} .ss-faults-view .ss-legend > span')].map(
    key => key.lastChild.textContent.trim())"""


def open_lab(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "faults.ipynb")
    notebook.open(tmp_path / "faults.ipynb").run_all()
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("1")  # the cell has ended, so the lab no longer chooses a tab


def test_a_rank_broken_from_the_lab_is_named_and_recovered_and_its_lost_steps_are_marked(notebook, tmp_path):
    open_lab(notebook, tmp_path)
    page = notebook.page
    page.locator(LAB).get_by_role("tab", name="Faults").click()
    breaker, view = page.locator(f"{LAB} .ss-break"), page.locator(f"{LAB} .ss-faults-view")
    breaker.get_by_text("Launch a run, and inject faults here while it trains").wait_for()

    page.locator(f"{LAB} .ss-buttons button", has_text="Start").click()
    breaker.get_by_label("Rank", exact=True).select_option("2")
    kill = breaker.get_by_role("button", name="Kill rank 2")
    notebook.until("lab.run is not None and lab.run.newest_checkpoint is not None", True)
    breaker.get_by_text("All ranks then continue from the checkpoint of step").wait_for()
    kill.click()

    breaker.get_by_text("rank 2 killed").wait_for()
    view.get_by_text("Rank 2 ", exact=False).wait_for(timeout=120_000)  # named
    view.get_by_text("training continued after", exact=False).wait_for(timeout=120_000)  # recovered
    view.get_by_text("had to be repeated", exact=False).wait_for()
    notebook.until("[lab.run.is_alive, lab.screen.faults.info.incidents[0].rank]", [True, 2])

    def lost_work_is_marked():
        assert {"lost work", "failure", "resumed from"} <= set(page.evaluate(KEYS))
        marked = page.locator(
            f"{LAB} .ss-faults-view .js-plotly-plot .annotation-text", has_text="rank 2 failed"
        )
        assert marked.count() == 1

    eventually(page, lost_work_is_marked)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        notebook.can_be_read(f"{LAB} .ss-faults-view .js-plotly-plot .xtick text, {LAB} .ss-break .ss-note")

    page.locator(f"{LAB} .ss-buttons button", has_text="Stop").click()
    breaker.get_by_role("button", name="Resume").wait_for(timeout=90_000)
    notebook.until("lab.problem", "")
