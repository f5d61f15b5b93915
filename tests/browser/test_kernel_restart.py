"""A kernel is restarted in mid-run: the lab says why the run stopped, and one click goes on with it."""

from __future__ import annotations

import nbformat
import pytest

from browser.notebook_page import eventually
from browser.test_training_lab import LAB, press, status

CELL = """
import shardscope as ss
from shardscope_widgets import TrainingLab
lab = TrainingLab(model="mlp", data="digits", strategy="ring", steps=100_000{more})
lab
"""
CUT_OFF = "Kernel message validation error"
"""What JupyterLab logs about a message of the old kernel that arrives while its socket is opened anew."""
RESUME = f"{LAB} .ss-break-row button"


def opened(notebook, folder, more=""):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(more=more))])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, folder / "restart.ipynb")
    notebook.open(folder / "restart.ipynb").run_all()
    notebook.page.wait_for_selector(f"{LAB} .ss-buttons button", timeout=120_000)
    return notebook


@pytest.mark.parametrize(
    ("more", "button"),
    [pytest.param("", "Start again", marks=pytest.mark.weekly), (", checkpoint_every=20", "Resume")],
)
def test_a_run_that_ended_with_its_kernel_says_so_and_goes_on_by_one_click(notebook, tmp_path, more, button):
    lab = opened(notebook, tmp_path, more)
    page = lab.page
    press(lab, "Start")
    status(lab, "is running")
    lab.until("ss.runs()[0].reduced().last_step > 25", True)
    first = lab.kernel("ss.runs()[0].id")
    lab.restart_kernel()
    lab.run_all()
    status(lab, "was stopped")
    status(lab, "It ended with the kernel or program that launched it.")
    offer = page.locator(f"{RESUME}:visible", has_text=button).first
    offer.wait_for(timeout=60_000)
    offer.click()
    status(lab, "is running")

    def goes_on():
        assert lab.kernel("len(ss.runs())") == 2
        assert lab.kernel("lab.focus") != first

    eventually(page, goes_on)
    lab.until(f"ss.runs()[0].reduced().last_step > {20 if button == 'Resume' else 0}", True)
    press(lab, "Stop")
    status(lab, "was stopped")
    assert lab.kernel("lab.problem") == ""
    lab.console_errors[:] = [text for text in lab.console_errors if CUT_OFF not in text]
