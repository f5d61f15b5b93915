"""A person searches: starts a study, prunes and opens trials by click, stops, reloads, restarts the kernel, goes on."""

from __future__ import annotations

import contextlib

import nbformat
import pytest

from browser.notebook_page import eventually

PlaywrightTimeout = pytest.importorskip("playwright.sync_api").TimeoutError

LAB = ".jp-OutputArea-output .ss-tuning"
FRONT = f"document.querySelector('{LAB} .ss-grow .js-plotly-plot')"
CELL = """
import shardscope as ss
from shardscope_widgets import TuningLab
link = ss.Link(bandwidth="1 Gbit/s", latency="15 ms")  # so that a trial takes its seconds on any machine
job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=150, link=link)
space = {"optimizer.lr": (1e-3, 1e-1, "log"), "compression": ["none", "int8", "topk"]}
lab = TuningLab(job, space, name="seen", trials=40)
lab
"""
PLACE = f"""([names, number]) => {{
    const plot = {FRONT};
    for (const trace of plot?.data ?? []) {{
        const place = names.includes(trace.name) ? trace.customdata.indexOf(number) : -1;
        if (place < 0) continue;
        const {{ xaxis, yaxis }} = plot._fullLayout;
        const box = plot.querySelector('.nsewdrag').getBoundingClientRect();
        const at = (axis, value) => axis.d2p(value);
        return [box.x + at(xaxis, trace.x[place]), box.y + at(yaxis, trace.y[place])];
    }}
    return null;
}}"""
SHOWN = f"""(name) => ({FRONT}?.data ?? []).filter(each => each.name?.startsWith(name))
    .flatMap(each => each.customdata ?? [])"""


def complete(notebook, count):
    shown = f"() => [...({SHOWN})('on the front'), ...({SHOWN})('dominated')].length >= {count}"
    notebook.page.wait_for_function(shown, timeout=180_000)


def press(notebook, name):
    notebook.page.locator(f"{LAB} .ss-buttons button", has_text=name).first.click()


def status(notebook, text):
    notebook.page.locator(f"{LAB} .ss-status", has_text=text).wait_for(timeout=120_000)


@pytest.fixture
def opened(notebook, tmp_path):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(written, tmp_path / "tune.ipynb")
    notebook.open(tmp_path / "tune.ipynb").run_all()
    notebook.page.wait_for_selector(f"{LAB} .ss-space-row select", timeout=120_000, state="attached")
    return notebook


def click(notebook, names, number):
    """Click the point of a trial, wherever it is by now; it may move between looking and clicking."""
    chosen = notebook.page.locator(f"{LAB} .ss-chosen .ss-heading", has_text=f"Trial {number} ")
    for _ in range(20):
        notebook.page.locator(f"{LAB} .ss-grow .js-plotly-plot").scroll_into_view_if_needed()
        place = notebook.page.evaluate(PLACE, [names, number])
        if place is not None:
            notebook.page.mouse.move(*place)
            notebook.page.mouse.click(*place)
            with contextlib.suppress(PlaywrightTimeout):
                chosen.wait_for(timeout=3_000)
                return True
    return False


def prune_by_click(notebook):
    """Prune a running trial; one that ends first makes way for the next. Returns its number."""
    page = notebook.page
    for _ in range(8):
        page.wait_for_function(f"() => ({SHOWN})('running').length > 0", timeout=120_000)
        number = page.evaluate(f"() => ({SHOWN})('running')[0]")
        prune = page.locator(f"{LAB} .ss-chosen button:not([disabled])", has_text="Prune")
        if number is not None and click(notebook, ["running"], number):
            with contextlib.suppress(PlaywrightTimeout):
                prune.click(timeout=6_000)
                page.locator(f"{LAB} tr[data-number='{number}'].pruned").wait_for(timeout=20_000)
                return number
    raise AssertionError("no running trial could be pruned")


def a_row_stays_where_it_is(page):
    """Choose the next row: the table does not move under the pointer, and Stop is still in view."""
    rows = page.locator(f"{LAB} .ss-trial-table tbody tr")
    row = page.locator(f"{LAB} .ss-trial-table tbody tr[data-number='0']")
    num_rows = None
    while num_rows != rows.count():  # a trial that begins meanwhile has its row above
        row.scroll_into_view_if_needed()
        num_rows, before = rows.count(), row.bounding_box()["y"]
        row.click()
        page.locator(f"{LAB} .ss-chosen .ss-heading", has_text="Trial 0 ").wait_for()
        after = row.bounding_box()["y"]
    assert abs(after - before) < 2
    stop = page.locator(f"{LAB} .ss-actions button", has_text="Stop").bounding_box()
    assert 0 < stop["y"] < page.viewport_size["height"] - stop["height"]


def test_start_watch_prune_open_stop_reload_and_go_on(opened):
    page = opened.page
    press(opened, "Start")
    complete(opened, 2)  # the front grows
    running = prune_by_click(opened)
    page.wait_for_function(f"(n) => ({SHOWN})('pruned').includes(n)", arg=running, timeout=120_000)

    assert click(opened, ["on the front", "dominated"], 0)
    a_row_stays_where_it_is(page)
    press(opened, "Open run")
    page.locator(f"{LAB} .ss-words", has_text="In each row, computation is above").wait_for(timeout=120_000)
    press(opened, "Stop")
    status(opened, "is stopped")
    opened.until("[lab.problem, lab.is_running]", ["", False])
    left = opened.kernel("[r.state for r in lab.session.records()]")
    assert left[running] == "pruned"
    assert "running" not in left

    opened.reload()
    complete(opened, 2)
    page.wait_for_function(f"(n) => ({SHOWN})('pruned').includes(n)", arg=running, timeout=120_000)
    has_rows(page, len(left))
    before = left.count("complete")
    press(opened, "Continue")
    complete(opened, before + 1)

    known = opened.kernel("[r.number for r in lab.session.records() if r.state in ('complete', 'pruned')]")
    opened.restart_kernel()
    opened.run_all()
    status(opened, "is stopped")
    complete(opened, before + 1)
    saved = page.locator(".jp-OutputArea-output .ss-still .ss-table", has_text="on the front")
    saved.wait_for(state="attached", timeout=120_000)  # hidden while the lab lives
    pruned = opened.kernel("sorted(r.number for r in lab.session.records() if r.state == 'pruned')")
    assert running in pruned  # and whatever the pruner has stopped meanwhile
    has_rows(page, opened.kernel("len(lab.session.records())"))
    filtered(opened, "state=pruned", pruned)
    press(opened, "Continue")
    complete(opened, before + 2)
    opened.kernel("[lab.stop(), lab.wait(120)]")
    records = opened.kernel("[[r.number, r.state, r.counted, r.retry_of] for r in lab.session.records()]")
    assert {number for number, state, *_ in records if state in {"complete", "pruned"}} >= set(known)
    assert [number for number, *_ in records] == list(range(len(records)))
    lost = [number for number, state, counted, _ in records if state == "failed" and not counted]
    taken = [origin for *_, origin in records if origin is not None]
    assert sorted(taken) == sorted(lost)  # each that was cut short is run again, once
    moved_to_another_link(opened)
    assert opened.kernel("[lab.problem, lab.is_running]") == ["", False]


def moved_to_another_link(notebook):
    """Tick the box: the front, the words and every trial with a time are those of the other link, without new runs."""
    page = notebook.page
    page.locator(f"{LAB} .widget-checkbox", has_text="Another link").locator("input").check()
    told = page.locator(f"{LAB} .ss-words", has_text="Times are predicted for 100 Mbit/s, 1 ms")
    told.wait_for(timeout=120_000)
    notebook.until("[trial.note for trial in lab.pictures._on_link if trial.note]", [])
    pairs = notebook.kernel(
        "[[a.values['seconds'], b.values['seconds']] for a, b in zip(lab._trials, lab.pictures._on_link)"
        " if 'seconds' in a.values]"
    )
    assert pairs
    assert all(there < here for here, there in pairs)  # the trials' own link has fifteen times the latency
    assert "seconds of training on 100 Mbit/s, 1 ms" in page.evaluate(f"{FRONT}.layout.xaxis.title.text")


def has_rows(page, count):
    """Wait until the table of trials has so many rows."""

    def are_there():
        assert page.locator(f"{LAB} .ss-trial-table tbody tr").count() == count

    eventually(page, are_there)


def filtered(notebook, query, numbers):
    """Type into the filter of the table; these trials are left, and the rest come back without it."""
    table = notebook.page.locator(f"{LAB} .ss-trial-table tbody tr")
    whole = table.count()
    assert len(numbers) < whole
    box = notebook.page.locator(f"{LAB} .ss-filter input")
    box.fill(query)
    notebook.page.wait_for_function(
        f'(n) => [...document.querySelectorAll("{LAB} .ss-trial-table tbody tr")]'
        ".map(row => Number(row.dataset.number)).sort((a, b) => a - b).join() === n.join()",
        arg=numbers, timeout=120_000,
    )  # fmt: skip
    notebook.until("lab.screen.table.query", query)
    box.fill("")
    has_rows(notebook.page, whole)
