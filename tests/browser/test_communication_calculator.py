"""A person at the communication calculator: reads it in both themes, ticks, slides, changes tabs, plays a picture."""

from __future__ import annotations

from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04-communication.ipynb"
CALCULATOR = ".jp-OutputArea-output .ss-comm"
LINES = f"""(axis) => document.querySelector('{CALCULATOR} .js-plotly-plot')?.data
    ?.filter(t => t.mode === 'lines' && t.xaxis === axis && t.y.length > 8).length ?? 0"""


def test_compare_tick_slide_and_play_in_both_themes(notebook, tmp_path):
    page = notebook.open(NOTEBOOK).page
    notebook.run_until("CommunicationCalculator(")
    page.wait_for_function(f"() => ({LINES})('x') >= 2", timeout=60_000)
    shown = page.evaluate(f"() => ({LINES})('x')")

    calculator = page.locator(CALCULATOR)
    ticked = calculator.locator("input[type=checkbox]")
    fewer = next(box for box in ticked.all() if box.is_visible() and box.is_checked())
    fewer.uncheck()
    page.wait_for_function(f"n => ({LINES})('x') === n && ({LINES})('x2') === n", arg=shown - 1)
    slider = calculator.locator(".noUi-handle").first
    slider.focus()
    before = notebook.kernel("calculator.num_bytes")
    status = calculator.locator(".ss-status").inner_text()
    for _ in range(4):
        slider.press("ArrowRight")
    page.wait_for_function(
        f"was => document.querySelector('{CALCULATOR} .ss-status').innerText !== was", arg=status
    )
    assert notebook.kernel("calculator.num_bytes") > before

    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        notebook.can_be_read(
            f"{CALCULATOR} .xtick text, {CALCULATOR} .annotation-text, {CALCULATOR} .ss-words"
        )
        page.screenshot(path=str(tmp_path / f"{theme[-5:].strip()}-size.png"))

    for tab in ("Workers", "Efficiency"):
        calculator.get_by_role("tab", name=tab).click()
        page.locator(f"{CALCULATOR} .ss-words:visible", has_text="64 workers").wait_for(timeout=60_000)
    calculator.get_by_role("tab", name="Who sends to whom").click()
    calculator.get_by_label("Algorithm", exact=True).select_option("tree")
    page.locator(f"{CALCULATOR} .ss-words:visible", has_text="tree, round 1 of 6: up, 1 of 3").wait_for()
    arrows = f"document.querySelectorAll('{CALCULATOR} svg.ss-who path[marker-end]')"
    page.wait_for_function(f"() => {arrows}.length === 4")
    assert notebook.kernel("calculator.problem.value") == ""
