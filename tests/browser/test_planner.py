"""A person plans: looks at the front, clicks a point and a row, moves a slider."""

from __future__ import annotations

from functools import partial

import nbformat

from browser.notebook_page import eventually

PLANNER = ".jp-OutputArea-output .ss-planner"
CELL = """
from shardscope_widgets import Planner
planner = Planner(model="gpt3-175b", nodes=16, global_batch=256, fix={"offload": "none", "schedule": "1f1b"})
planner
"""
DOT = f"""() => {{
    const dots = [...document.querySelectorAll('{PLANNER} .js-plotly-plot .scatterlayer .point')];
    const boxes = dots.map(dot => dot.getBoundingClientRect()).filter(box => box.width > 4);
    const box = boxes[Math.floor(Math.random() * boxes.length)];
    return box ? [box.x + box.width / 2, box.y + box.height / 2] : null;
}}"""


def test_a_point_a_row_and_a_slider_change_what_is_shown(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "plan.ipynb")
    notebook.open(tmp_path / "plan.ipynb").run_all()
    page = notebook.page
    page.wait_for_selector(f"{PLANNER} .js-plotly-plot .point", timeout=60_000)
    rows = page.locator(f"{PLANNER} .ss-plan-table tbody tr")
    eventually(page, partial(has_plans, rows, 15))

    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(f"{PLANNER} .ss-copied button").click()
    page.locator(f"{PLANNER} .ss-copied button", has_text="Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == notebook.kernel(
        "planner.screen.flags.text"
    )
    page.locator(f"{PLANNER} .widget-toggle-button", has_text="pipeline").click()
    notebook.until("planner.screen.by.value", "pipeline")
    eventually(page, partial(a_square_names_its_links, page))

    rows.nth(4).click()
    page.wait_for_selector(f"{PLANNER} .ss-told:has-text('Plan 5 takes')")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(f"{PLANNER} tr[aria-selected=true]:nth-child(6)")
    notebook.until("planner.chosen", 6)
    page.wait_for_selector(f"{PLANNER} .ss-told:has-text('Plan 6 takes')")

    eventually(page, partial(click_a_point, page))
    assert notebook.kernel("planner.screen.scatter.clicked") >= 0

    best = notebook.kernel("planner.plans.best.step_time_s")
    page.locator(f"{PLANNER} .ss-weights .noUi-handle").nth(1).focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => document.querySelector('{PLANNER} tr[aria-selected=true]:nth-child(1)')")
    notebook.until(  # twenty strokes are on their way
        f"[planner.weights['headroom'], planner.plans.best.step_time_s > {best!r}, planner.problem]",
        [1.0, True, ""],
    )


def test_the_verdict_stays_in_view_beside_what_changes_it(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "narrow.ipynb")
    notebook.open(tmp_path / "narrow.ipynb").run_all()
    page = notebook.page
    page.set_viewport_size({"width": 600, "height": 700})
    verdict = page.locator(f"{PLANNER} .ss-status", has_text="gpt3-175b fits")
    verdict.wait_for(timeout=60_000)
    page.locator(f"{PLANNER} .ss-measured").scroll_into_view_if_needed()
    eventually(page, partial(is_at_the_top, verdict))
    page.set_viewport_size({"width": 1360, "height": 1100})


def is_at_the_top(verdict):
    assert 0 <= verdict.bounding_box()["y"] < 200


def a_square_names_its_links(page):
    box = page.locator(f"{PLANNER} .js-plotly-plot .heatmaplayer").bounding_box()
    page.mouse.move(0, 0)
    page.mouse.move(box["x"] + box["width"] * 0.02, box["y"] + box["height"] * 0.1, steps=3)
    page.wait_for_timeout(300)
    told = page.locator(f"{PLANNER} .hoverlayer .hovertext").text_content(timeout=1000)
    assert "nvlink-3 within a node" in told


def has_plans(rows, count):
    assert rows.count() == count


def click_a_point(page):
    """Click a point of the scatter; Plotly forgets where the pointer is when it draws the plot anew."""
    page.mouse.move(0, 0)
    page.mouse.click(*page.evaluate(DOT))
    page.wait_for_timeout(500)
    assert not page.locator(f"{PLANNER} tr[aria-selected=true]:nth-child(6)").count()
