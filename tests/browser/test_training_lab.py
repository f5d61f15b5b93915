"""A person at work: opens the tour, starts a run from the widget, sees it learn, stops it, starts another,
reloads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "notebooks" / "01-tour.ipynb"
LAB = ".jp-OutputArea-output .ss-lab"
PLOT = f"document.querySelector('{LAB} .ss-right .js-plotly-plot')"
POINTS = f"""(label) => {{
    const lines = {PLOT}?.data?.filter(t => t.visible !== false && t.name === label && (t.xaxis ?? 'x') === 'x') ?? [];
    return Math.max(0, ...lines.map(t => t.y?.length ?? 0));
}}"""
LABEL = "lab._book.entries[{!r}].trace.label"


def wait_for_points(notebook, label, count, timeout_ms=120_000):
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


def status(notebook, text, timeout_ms=90_000):
    notebook.page.locator(f"{LAB} .ss-status", has_text=text).wait_for(timeout=timeout_ms)


def started(notebook):
    """Press Start; the id of the run that this has started, once the kernel has."""
    before = notebook.kernel("[run.id for run in lab.runs]")
    press(notebook, "Start")
    notebook.until(f"[len(lab.runs), lab.focus in {before}]", [len(before) + 1, False])
    return notebook.kernel("lab.run.id")


@pytest.fixture(scope="module")
def notebook(shared_notebook, tmp_path_factory):
    """The tour with fewer steps, once its lab shows the tour's run and describes its job.

    What one test has done, the next one finds.
    """
    whole, tour = TOUR.read_text(), tmp_path_factory.mktemp("tour") / TOUR.name
    assert "steps=200" in whole
    tour.write_text(whole.replace("steps=200", "steps=60"))
    shared_notebook.open(tour).run_all()
    shared_notebook.kernel(
        "[lab.watch(run), lab.fill(job), setattr(lab.screen.tabs, 'selected_index', 1)][0]"
    )
    shared_notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    shared_notebook.until("lab.run is None", False)
    return shared_notebook


def test_it_can_be_read_in_both_themes_and_plays_one_step(notebook):
    notebook.kernel("lab.run.wait(200).id")
    notebook.page.wait_for_function(
        f"() => document.querySelectorAll('{LAB} .ss-right .js-plotly-plot')[1].data[1].x?.length > 0"
    )
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        notebook.can_be_read(f"{LAB} .js-plotly-plot .xtick text, {LAB} .ss-words")
    notebook.page.locator(LAB).get_by_role("tab", name="One step").click()
    player = notebook.page.locator(f"{LAB} .ss-step")
    player.get_by_role("button", name="Next event").click()
    player.get_by_role("button", name="Play (space)").click()
    player.get_by_role("button", name="Pause").wait_for(timeout=120_000)
    player.press("End")
    player.locator(".now", has_text="The step is complete.").wait_for(timeout=120_000)
    notebook.until("lab.screen.player.position", 1.0)


def test_start_watch_stop_start_again_and_reload(notebook):
    notebook.page.locator(LAB).get_by_role("tab", name="Live").click()
    notebook.kernel("[setattr(lab, 'steps', 100_000), lab.run.stop().id][1]")
    choose(notebook, "Strategy", "ring")
    first = started(notebook)
    label = notebook.kernel("lab._focus_trace().label")
    wait_for_points(notebook, label, 5)
    wait_for_points(notebook, label, notebook.page.evaluate(POINTS, label) + 3)  # the curve moves
    press(notebook, "Stop")
    status(notebook, "was stopped")

    choose(notebook, "Strategy", "all-reduce")
    second = started(notebook)
    status(notebook, "all-reduce")
    status(notebook, "is running")
    label, other = (
        notebook.kernel(LABEL.format(run)) for run in (first, second)
    )  # by what differs between the two
    assert "all-reduce" in other
    assert label != other
    wait_for_points(notebook, other, 3)
    notebook.kernel(f"setattr(lab, 'shown', [{first!r}, {second!r}])")  # a launch ticks its own run only

    notebook.reload()
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    wait_for_points(notebook, label, 8)
    wait_for_points(notebook, other, 5)
    for run, state in ((label, "stopped"), (other, "running")):
        row = notebook.page.locator(f"{LAB} .ss-run", has_text=run).filter(has_text=state)
        row.first.wait_for(timeout=120_000)
    assert first != second
    press(notebook, "Stop")
    status(notebook, "was stopped")
    notebook.until("[lab.problem, any(run.is_alive for run in lab.runs)]", ["", False])


def test_an_error_shows_in_place_and_names_the_rank(notebook):
    notebook.kernel("[lab.run.stop().id, exec('def broken():\\n    raise ValueError(\"no such layer\")')][0]")
    notebook.kernel("[setattr(lab, 'model', broken), setattr(lab, 'data', 'digits')][0]")
    press(notebook, "Start")
    problem = notebook.page.locator(f"{LAB} .ss-problem", has_text="no such layer").filter(has_text="failed")
    problem.wait_for(timeout=120_000)
