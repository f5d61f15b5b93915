"""All panels as tabs of one job, in JupyterLab."""

from __future__ import annotations

import nbformat

from conformance.runs import SHORT_TEXT

CELL = f"""
import os, tempfile
os.environ["SHARDSCOPE_RUNS"] = tempfile.mkdtemp()
import shardscope as ss
from shardscope_widgets import Lab
lab = Lab(ss.Job(model="gpt-nano", data={SHORT_TEXT!r}, strategy="zero-3", world_size=2, steps=20))
lab
"""
OUTER = ".jp-OutputArea-output > .ss-lab"
SHOWS = {
    "Plan": ".ss-planner .ss-numbers",
    "Predict": ".ss-step",
    "Compare": ":is(.ss-twin .ss-status.warning, .ss-twin .ss-status.completed)",
    "Tune": ".ss-tuning .ss-actions",
    "Break": ".ss-fault-lab .js-plotly-plot",
    "Run": ".ss-presets",
}
"""What is seen in each tab once it has been filled."""


def test_each_tab_shows_its_panel_and_the_job_is_changed_in_one_place(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "lab.ipynb")
    lab = notebook.open(tmp_path / "lab.ipynb")
    lab.run_all()
    page = lab.page
    page.wait_for_selector(f"{OUTER} .ss-presets")
    lab.kernel("lab.panels['Run'].start().wait(120) and lab.panels['Run'].refresh()")
    for tab, shown in SHOWS.items():
        page.locator(OUTER).first.get_by_role("tab", name=tab, exact=True).click()
        page.locator(OUTER).first.locator(shown).first.wait_for(state="visible")
        assert lab.kernel("[lab.tab, lab.problem]") == [tab, ""]
    ranks = page.locator(OUTER).first.get_by_label("Ranks", exact=True).first
    ranks.fill("4")
    ranks.press("Tab")
    page.locator(f"{OUTER} .ss-title", has_text="zero-3-gpt-nano on 4 ranks").first.wait_for()
    page.locator(OUTER).first.get_by_role("tab", name="Tune", exact=True).click()
    page.get_by_role("button", name="Use this job").click()
    lab.until("lab.panels['Tune'].job().world_size", 4)
    page.get_by_role("button", name="Use this job").wait_for(state="hidden")
    assert not page.locator(".ss-still").is_visible()
