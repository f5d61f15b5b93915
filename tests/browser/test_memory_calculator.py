"""A person drags a slider of the Memory Calculator with the keyboard, and sees the verdict turn."""

from __future__ import annotations

from functools import partial

import nbformat
import pytest

from browser.notebook_page import eventually

LAB = ".jp-OutputArea-output .ss-memory"
INKS = "selector => [...document.querySelectorAll(selector)].map(node => getComputedStyle(node).fill)"
CODE = """from shardscope_widgets import MemoryCalculator
calculator = MemoryCalculator(model="gpt3-175b", data=8, tensor=8, pipeline=4, zero=0)
calculator"""


@pytest.fixture
def calculator(notebook, tmp_path):
    cells = [nbformat.v4.new_code_cell(CODE)]
    page = nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )
    nbformat.write(page, tmp_path / "calculator.ipynb")
    notebook.open(tmp_path / "calculator.ipynb").run_all()
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .bars path", timeout=60_000)
    return notebook


def test_dragging_a_slider_turns_the_verdict(calculator):
    page = calculator.page
    page.locator(f"{LAB} .ss-status", has_text="Does not fit").wait_for()
    slider = page.locator(f"{LAB} .widget-slider", has=page.locator("text=ZeRO stage")).locator(
        ".noUi-handle"
    )
    slider.focus()
    slider.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('.ss-memory .ss-status').innerText.startsWith('Fits')"
    )
    page.set_viewport_size({"width": 600, "height": 600})
    page.locator(f"{LAB} table").last.scroll_into_view_if_needed()
    eventually(page, partial(is_at_the_top, page.locator(f"{LAB} .ss-status")))
    page.set_viewport_size({"width": 1360, "height": 1100})
    assert calculator.kernel("calculator.zero") == 1
    calculator.kernel("calculator.set_trait('global_batch', 1537)")
    problem = page.locator(f"{LAB} .ss-problem", has_text="global_batch=1537 is not a multiple")
    problem.wait_for(timeout=60_000)
    page.locator(f"{LAB} .js-plotly-plot").wait_for(state="hidden", timeout=60_000)
    calculator.kernel("calculator.set_trait('global_batch', 1536)")
    page.locator(f"{LAB} .js-plotly-plot").wait_for(timeout=60_000)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        calculator.use_theme(theme)
        calculator.can_be_read(f"{LAB} .js-plotly-plot .ytick text, {LAB} .js-plotly-plot .legendtext")
        eventually(page, partial(a_label_is_light, page))


def is_at_the_top(verdict):
    assert 0 <= verdict.bounding_box()["y"] < 200


def a_label_is_light(page):
    """Point at a bar; Plotly forgets where the pointer is when it draws the figure anew."""
    page.mouse.move(0, 0)
    page.locator(f"{LAB} .js-plotly-plot .bars path").first.hover(force=True)
    page.wait_for_timeout(500)
    assert set(page.evaluate(INKS, f"{LAB} .hoverlayer .hovertext text")) == {"rgb(244, 245, 247)"}
