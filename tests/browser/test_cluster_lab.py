"""A person trains on an emulated cluster from the Training Lab, and changes the number of ranks of an elastic run."""

from __future__ import annotations

import nbformat
import pytest

from shardscope.runtime.emulated import why_not_emulated

LAB = ".jp-OutputArea-output .ss-lab"
CELL = """
from shardscope_widgets import TrainingLab
lab = TrainingLab(model="mlp", data="digits", strategy="ring", world_size=2, global_batch=48, steps=100_000)
lab
"""


@pytest.fixture(scope="module")
def lab(shared_notebook, tmp_path_factory):
    """The notebook with a lab in it, and the lab."""
    notebook, folder = shared_notebook, tmp_path_factory.mktemp("cluster")
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, folder / "cluster.ipynb")
    notebook.open(folder / "cluster.ipynb").run_all()
    notebook.page.wait_for_selector(f"{LAB} .js-plotly-plot .main-svg", timeout=60_000)
    notebook.kernel("lab.place.wait(30)")
    return notebook, notebook.page.locator(LAB)


def enter(lab, label, text):
    box = lab.get_by_label(label, exact=True)
    box.fill(text)
    box.press("Enter")


def press(lab, name):
    lab.locator(".ss-buttons button", has_text=name).click()


def test_an_elastic_run_is_resized_from_the_lab_and_its_curves_say_so(lab):
    notebook, shown = lab
    shown.get_by_text("Checkpoints and recovery").click()
    enter(shown, "Elastic", "2:4")
    notebook.until("lab.elastic", "2:4")
    shown.get_by_role("tab", name="Faults").click()
    press(shown, "Start")
    resizer = shown.locator(".ss-resize")
    notebook.until("lab.run is not None and lab.run.reduced().last_step > 3", True)
    resizer.get_by_label("Ranks", exact=True).select_option("3")
    resizer.get_by_text("3 ranks load this state and continue").wait_for()
    resizer.get_by_role("button", name="Resize").click()
    notebook.until("[lab.run.world_size, lab.problem]", [3, ""])
    resizer.get_by_text("The run already has 3 ranks").wait_for()
    shown.get_by_role("tab", name="Live").click()
    shown.locator(".js-plotly-plot .annotation-text", has_text="3 ranks").first.wait_for()
    press(shown, "Stop")
    shown.get_by_role("tab", name="Faults").click()
    resizer.get_by_text("it cannot be resized").wait_for()
    assert resizer.get_by_role("button", name="Resize").is_disabled()


def test_a_run_on_an_emulated_cluster_is_chosen_predicted_and_started(lab):
    notebook, shown = lab
    notebook.kernel("setattr(lab, 'elastic', '')")  # left behind by the test before
    shown.get_by_text("Where it runs").click()
    place = shown.get_by_label("Runs on", exact=True)
    if why_not := why_not_emulated():
        assert place.is_disabled()
        shown.get_by_text(why_not[1:]).wait_for()
        return
    here = notebook.kernel("lab.screen.forecast.wait(60) or lab.screen.forecast.found.prediction.step_time_s")
    place.select_option("an emulated cluster")
    enter(shown, "Nodes", "4")
    shown.get_by_label("Node link", exact=True).select_option("10 Mbit/s")
    enter(shown, "Racks", "2")
    shown.get_by_label("Rack uplink", exact=True).select_option("10 Mbit/s")
    shown.get_by_text("Runs on 4 emulated nodes in 2 racks, 10 Mbit/s").wait_for()
    notebook.until("[lab.world_size, lab.num_ranks]", [4, 4])
    there = notebook.kernel(
        "lab.screen.forecast.wait(60) or lab.screen.forecast.found.prediction.step_time_s"
    )
    assert there > 5 * here
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        notebook.can_be_read(f"{LAB} .ss-topics .ss-note")

    press(shown, "Start")
    shown.get_by_text("is running on 4 emulated nodes in 2 racks").wait_for()
    notebook.until(
        "[lab.run.cluster == lab.place.choices.cluster(), lab.run.reduced().last_step > 3]", [True, True]
    )
    press(shown, "Stop")
    shown.get_by_text("was stopped on 4 emulated nodes").wait_for()
    notebook.until("lab.problem", "")
