"""Two real studies in one Tuning Lab: the first gains a column in mid-study, the second starts with an empty page."""

from __future__ import annotations

import nbformat

from browser.notebook_page import eventually
from browser.test_tuning_lab import LAB, press, status

CELL = """
import optuna
import shardscope as ss
from shardscope_widgets import TuningLab
link = ss.Link(bandwidth="1 Gbit/s", latency="15 ms")  # so that a trial takes its seconds on any machine
job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=30, eval_every=15, link=link)
space = {"compression": ["none", "powersgd"], "compression[powersgd].rank": (1, 8), "optimizer.lr": (1e-3, 1e-1, "log")}
# with this seed the fourth trial is the first of powersgd
given = dict(sampler=optuna.samplers.RandomSampler(seed=4), baselines=False, objectives=["loss", "bytes"], trials=5)
lab = TuningLab(job, space, name="first", **given)
lab
"""
TABLE = f"""() => [...document.querySelectorAll("{LAB} .ss-trial-table tr")]
    .map(row => [...row.children].map(cell => cell.textContent))"""
STORED = """[[str(r.number), f"{r.params['optimizer.lr']:.3g}", r.params["compression"], str(r.params.get("compression["
    "powersgd].rank", ""))] for r in lab.session.records() if r.state == "complete"]""".replace("\n", " ")
AXIS = f"""() => (plot => plot?.data?.length ? [plot._fullLayout.yaxis.type, plot._fullLayout.yaxis.range,
    plot.data.flatMap(line => line.y).filter(y => y !== null)] : null)(
    document.querySelector("{LAB} .ss-side .js-plotly-plot"))"""


def shown(page):
    """Number, learning rate, compression and rank of each complete trial, as the table shows them."""
    header, *rows = page.evaluate(TABLE)
    assert all(len(row) == len(header) for row in rows)
    places = [header.index(name) for name in ("trial", "lr", "compression", "rank") if name in header]
    found = [[row[place] for place in places] for row in rows if row[1].startswith(("complete", "front"))]
    return sorted((row if "rank" in header else [*row, ""] for row in found), key=lambda row: int(row[0]))


def as_stored(notebook):
    """Wait until the table says what the storage says."""

    def are_equal():
        stored = [[number, f"{float(lr):.3g}", *rest] for number, lr, *rest in notebook.kernel(STORED)]
        found = [[number, f"{float(lr):.3g}", *rest] for number, lr, *rest in shown(notebook.page)]
        assert found == stored

    eventually(notebook.page, are_equal)


def test_a_conditional_setting_that_appears_late_and_a_second_study(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "grow.ipynb")
    notebook.open(tmp_path / "grow.ipynb").run_all()
    page = notebook.page
    page.wait_for_selector(f"{LAB} .ss-space-row select", timeout=120_000, state="attached")
    press(notebook, "Start")
    page.locator(f"{LAB} .ss-trial-table tbody tr[data-number='0']").wait_for(timeout=120_000)
    assert "rank" not in page.evaluate(TABLE)[0]
    status(notebook, "has finished")
    assert "rank" in page.evaluate(TABLE)[0]
    as_stored(notebook)
    for number in (3, 1, 4):
        page.locator(f"{LAB} .ss-trial-table tr[data-number='{number}']").click()
        page.locator(f"{LAB} .ss-chosen .ss-heading", has_text=f"Trial {number} ").wait_for()
        notebook.until("lab.chosen", number)
        assert page.locator(f"{LAB} .ss-trial-table tr[aria-selected='true']").count() == 1
    front = page.locator(".jp-OutputArea-output .ss-still .ss-table", has_text="on the front")
    front.wait_for(state="attached")  # hidden while the lab lives

    notebook.kernel("setattr(lab, 'name', 'second') or 0")
    front.wait_for(state="detached")
    assert page.evaluate(TABLE)[1:] == []
    press(notebook, "Start")
    status(notebook, "Study second has finished")
    as_stored(notebook)

    def axes_follow():
        kind, ends, values = page.evaluate(AXIS)
        low, high = [10**end for end in ends] if kind == "log" else ends
        assert low <= min(values) <= max(values) <= high
        assert kind == "log" or max(values) - min(values) > 0.5 * (high - low)

    eventually(page, axes_follow)
    assert notebook.kernel("lab.problem") == ""
