"""A person at work: opens the tour, starts a run from the widget, sees it learn, stops it, starts another,
reloads.
"""

from __future__ import annotations

import time
from pathlib import Path

TOUR = Path(__file__).parents[2] / "notebooks" / "01-tour.ipynb"
LAB = ".jp-OutputArea-output .ss-lab"
PLOT = f"document.querySelector('{LAB} .js-plotly-plot')"
POINTS = f"""(label) => {{
    const lines = {PLOT}?.data?.filter(t => t.visible !== false && t.name === label && (t.xaxis ?? 'x') === 'x') ?? [];
    return Math.max(0, ...lines.map(t => t.y?.length ?? 0));
}}"""
LABEL = "lab._book.entries[{!r}].trace.label"
CONTRAST = """(selector) => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(Number)
            .map(v => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()
        .replace(/^#(.)(.)(.)$/, '#$1$1$2$2$3$3').replace(/^#(..)(..)(..)$/, (_, ...c) =>
            'rgb(' + c.slice(0, 3).map(x => parseInt(x, 16)).join(',') + ')').replace(/^white$/,
            'rgb(255,255,255)'));
    return [...document.querySelectorAll(selector)].map(node => {
        const style = getComputedStyle(node);
        const ink = light(node instanceof SVGElement ? style.fill : style.color);
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
}"""


def wait_for_points(notebook, label, count, timeout_ms=60_000):
    notebook.page.wait_for_function(
        f"([label, count]) => ({POINTS})(label) > count", arg=[label, count], timeout=timeout_ms
    )


UNFOLD = """control => control.closest('.jupyter-widget-Collapse:not(.jupyter-widget-Collapse-open)')
    ?.querySelector('.jupyter-widget-Collapse-header').click()"""


def choose(notebook, label, value):
    control = notebook.page.locator(f"{LAB} .ss-controls").get_by_label(label, exact=True)
    control.evaluate(UNFOLD)
    control.select_option(value)


def press(notebook, name):
    notebook.page.locator(f"{LAB} .ss-buttons button", has_text=name).click()


def status(notebook, text, timeout_ms=30_000):
    notebook.page.locator(f"{LAB} .ss-status", has_text=text).wait_for(timeout=timeout_ms)


def test_start_watch_stop_start_again_and_reload(notebook):
    notebook.open(TOUR).run_until("TrainingLab(")
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("[setattr(lab, 'steps', 100_000), lab.run.stop().id][1]")

    choose(notebook, "Strategy", "ring")
    press(notebook, "Start")
    first = notebook.kernel("lab.run.id")
    label = notebook.kernel("lab._focus_trace().label")
    wait_for_points(notebook, label, 5, 60_000)
    wait_for_points(notebook, label, notebook.page.evaluate(POINTS, label) + 3)  # the curve moves
    press(notebook, "Stop")
    status(notebook, "was stopped")

    choose(notebook, "Strategy", "all-reduce")
    press(notebook, "Start")
    status(notebook, "all-reduce")
    status(notebook, "is running")
    second = notebook.kernel("lab.run.id")
    label, other = (
        notebook.kernel(LABEL.format(run)) for run in (first, second)
    )  # by what differs between the two
    assert "ring" in label
    assert "all-reduce" in other
    wait_for_points(notebook, other, 3)

    notebook.reload()
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    wait_for_points(notebook, label, 8)
    wait_for_points(notebook, other, 5)
    rows = notebook.page.locator(f"{LAB} .ss-run").all_inner_texts()
    assert any(label in row and "stopped" in row for row in rows)
    assert any(other in row and "running" in row for row in rows)
    assert first != second
    press(notebook, "Stop")
    status(notebook, "was stopped")
    assert notebook.kernel("[lab.problem, any(run.is_alive for run in lab.runs)]") == ["", False]


def test_it_can_be_read_in_both_themes_and_plays_one_step(notebook):
    notebook.open(TOUR).run_until("TrainingLab(")
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("lab.run.wait(60).id")
    notebook.page.wait_for_function(
        f"() => document.querySelectorAll('{LAB} .js-plotly-plot')[1].data[1].x?.length > 0"
    )
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        ratios = notebook.page.evaluate(CONTRAST, f"{LAB} .js-plotly-plot .xtick text, {LAB} .ss-words")
        assert min(ratios) >= 4.5, f"{theme}: {min(ratios):.2f}"
    notebook.page.locator(LAB).get_by_role("tab", name="One step").click()
    player = notebook.page.locator(f"{LAB} .ss-step")
    player.get_by_role("button", name="Next event").click()
    player.get_by_role("button", name="Play").click()
    player.get_by_role("button", name="Pause").wait_for(timeout=60_000)
    player.press("End")
    player.locator(".now", has_text="The step is over.").wait_for(timeout=60_000)
    deadline = time.monotonic() + 60
    while notebook.kernel("lab.screen.player.position") != 1.0:  # it is on its way
        assert time.monotonic() < deadline
        notebook.page.wait_for_timeout(50)


def test_an_error_shows_in_place_and_names_the_rank(notebook):
    notebook.open(TOUR).run_until("TrainingLab(")
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("[lab.run.stop().id, exec('def broken():\\n    raise ValueError(\"no such layer\")')][0]")
    notebook.kernel("[setattr(lab, 'model', broken), setattr(lab, 'data', 'digits')][0]")
    press(notebook, "Start")
    problem = notebook.page.locator(f"{LAB} .ss-problem")
    problem.wait_for(timeout=60_000)
    assert "failed" in problem.inner_text()
    assert "no such layer" in problem.inner_text()
