"""A person looks at what an architecture adds: the pipeline's chart, ZeRO's memory, the verdict of a check."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser.test_training_lab import LAB, choose, press, status

pytestmark = pytest.mark.weekly

TOUR = Path(__file__).parents[2] / "notebooks" / "01-tour.ipynb"
BARS = """(heading) => {
    const heads = [...document.querySelectorAll('.jp-OutputArea-output .ss-lab .ss-heading')];
    const box = heads.find(head => head.textContent.startsWith(heading))?.closest('.widget-vbox');
    return box?.checkVisibility() ? box.querySelectorAll('.js-plotly-plot .bars path').length : 0;
}"""


@pytest.fixture(scope="module")
def lab(shared_notebook):
    """The tour's lab on four ranks of this machine, once the tour has ended."""
    notebook = shared_notebook.open(TOUR)
    notebook.run_all()
    notebook.kernel("[lab.watch(run), lab.fill(job), setattr(lab.screen.tabs, 'selected_index', 1)][0]")
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("[lab.set_trait('world_size', 4), lab.set_trait('steps', 6)][0]")
    return notebook


def wait_for_bars(notebook, heading, at_least):
    notebook.page.wait_for_function(
        f"([heading, count]) => ({BARS})(heading) >= count", arg=[heading, at_least], timeout=60_000
    )


def test_a_pipelines_chart_and_zeros_memory_appear_with_their_runs(lab):
    assert lab.page.evaluate(BARS, "Pipeline") == 0
    choose(lab, "Strategy", "pipeline")
    choose(lab, "Schedule", "GPipe")
    press(lab, "Start")
    status(lab, "has finished", 60_000)
    wait_for_bars(lab, "Pipeline", 4 * 2 * 8)

    choose(lab, "Strategy", "zero-2")
    press(lab, "Start")
    status(lab, "zero-2 has finished", 60_000)
    wait_for_bars(lab, "Memory by type", 4)  # all ranks hold the same: one bar of several types
    lab.page.wait_for_function(f"() => ({BARS})('Pipeline') === 0")  # the run in focus is no pipeline
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.use_theme(theme)
        lab.can_be_read(f"{LAB} .js-plotly-plot .ytick text, {LAB} .js-plotly-plot .legendtext")


def test_the_check_button_shows_its_verdict_in_place(lab):
    choose(lab, "Strategy", "ring")
    press(lab, "Check")
    lab.page.locator(f"{LAB} .ss-buttons button", has_text="Cancel").wait_for(timeout=60_000)
    verdict = lab.page.locator(f"{LAB} .ss-verdict")
    verdict.wait_for(timeout=60_000)
    assert "ring on 4 ranks agrees with one process" in verdict.inner_text()
    assert verdict.locator("tbody tr").count() > 3
    lab.page.locator(f"{LAB} .ss-buttons button", has_text="Check").wait_for(timeout=60_000)
