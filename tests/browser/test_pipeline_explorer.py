"""A person moves the sliders of the Pipeline Explorer and sees the schedule follow."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

EXPLORER = ".jp-OutputArea-output .ss-explorer"
BARS = f"document.querySelectorAll('{EXPLORER} .js-plotly-plot .bars .point').length"
CODE = """
from shardscope_widgets import PipelineExplorer
explorer = PipelineExplorer(stages=4, microbatches=8)
explorer
"""


@pytest.fixture
def explorer(notebook, tmp_path: Path):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)], metadata={"kernelspec": kernel})
    nbformat.write(page, tmp_path / "explorer.ipynb")
    notebook.open(tmp_path / "explorer.ipynb").run_all()
    return notebook


def wait_for_bars(explorer, count):
    explorer.page.wait_for_function(f"() => {BARS} === {count}", timeout=60_000)


def test_picker_and_sliders_change_the_chart_by_hand_and_keyboard(explorer):
    page = explorer.page
    wait_for_bars(explorer, 4 * 8 * 2)
    page.locator(f"{EXPLORER} select").select_option("ZB-V")
    wait_for_bars(explorer, 4 * 8 * 6)
    slider = page.locator(f"{EXPLORER} .noUi-handle").nth(0)
    slider.focus()
    slider.press("ArrowRight")
    wait_for_bars(explorer, 5 * 8 * 6)
    assert explorer.kernel("explorer.stages") == 5
    page.locator(f"{EXPLORER} tr.selected", has_text="ZB-V").wait_for()

    page.locator(f"{EXPLORER} select").select_option("DualPipeV")
    page.locator(f"{EXPLORER} .ss-status.failed", has_text="needs at least 10").wait_for()
    page.locator(f"{EXPLORER} select").select_option("1F1B")
    wait_for_bars(explorer, 5 * 8 * 2)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        explorer.use_theme(theme)
        explorer.can_be_read(f"{EXPLORER} .js-plotly-plot .ytick text, {EXPLORER} .ss-schedules td")
