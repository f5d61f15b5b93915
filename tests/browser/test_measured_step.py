"""A person enters the time of a measured step in the planner: all plans are ranked again."""

from __future__ import annotations

import nbformat

PLANNER = ".jp-OutputArea-output .ss-planner"
CELL = """
from shardscope_widgets import Planner
planner = Planner(model="gpt2", device="a100-80gb", nodes=1, global_batch=64)
before = planner.plans.best.step_time_s
planner
"""


def test_a_measured_step_ranks_all_plans_again(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "measure.ipynb")
    notebook.open(tmp_path / "measure.ipynb").run_all()
    page = notebook.page
    field = page.locator(f"{PLANNER} .ss-measured input")
    field.wait_for(timeout=60_000)
    field.fill(str(1.3 * notebook.kernel("before")))
    field.press("Enter")
    page.locator(f"{PLANNER} .ss-measured button").first.click()
    page.wait_for_selector(f"{PLANNER} .ss-words:has-text('before calibration')")
    notebook.until(
        "[len(planner.measured), planner.plans.best.step_time_s > 1.1 * before, planner.problem]",
        [1, True, ""],
    )
