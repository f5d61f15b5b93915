"""The first minute with the Training Lab, and what it shows once its kernel is gone."""

from __future__ import annotations

import json
import time

import pytest

from browser.notebook_page import KERNEL_IDLE, eventually
from browser.test_training_lab import LAB, press, status

START_DETACHED = """[setattr(lab, 'steps', 100_000), lab.watch(__import__('shardscope').launch(
    lab.job(), detach=True)), lab.focus][2]""".replace("\n", " ")
"""A detached run outlives its kernel."""
CELLS = ("from shardscope_widgets import TrainingLab\nlab = TrainingLab()\nlab",)
BANNER = "Kernel restarted; run this cell again."
SAVED = "A picture of this panel; run this cell to use the panel."
MOVING = (
    f"() => document.querySelector('{LAB} .ss-right .js-plotly-plot')?.data?.some(line => line.y?.length > 2)"
)
STATE = f"""() => {{
    const lab = document.querySelector('{LAB}');
    const shown = node => node?.checkVisibility() ? node.textContent.trim() : '';
    const banners = [...document.querySelectorAll('.ss-banner, .ss-fallback')].map(shown).filter(Boolean);
    const start = lab?.querySelector('.ss-buttons button');
    const broken = [...document.querySelectorAll('.jupyter-widgets-disconnected')].filter(
        node => getComputedStyle(node, '::before').content !== 'none').length;
    return {{ lab: !!lab, banners, broken, canStart: !!start && !start.closest('[inert]') && !start.disabled }};
}}"""
IS_LIVE = f"() => (({STATE})().canStart && ({STATE})().banners.length === 0)"
IS_GONE = f"() => (s => s.banners.length === 1 && !s.canStart && !s.broken)(({STATE})())"
LEAST_RESTARTS, LEAST_RELOADS = 20, 100
NO_MODEL = "widget model not found"


@pytest.fixture
def lab(notebook, tmp_path):
    return notebook.open(written(tmp_path))


def written(folder):
    """A notebook with a lab in it."""
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "outputs": [], "execution_count": None, "source": text}
        for n, text in enumerate(CELLS)
    ]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    file = folder / "lab.ipynb"
    file.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells}))
    return file


def wait_for(lab, condition, timeout_ms=120_000):
    lab.page.wait_for_function(condition, timeout=timeout_ms)


def forget_missing_models(lab):
    """Drop console errors that these tests bring about: models that are gone, or that a busy machine sends late."""
    expected = (NO_MODEL, "[anywidget] Failed to initialize model")
    lab.console_errors[:] = [
        each for each in lab.console_errors if not any(text in each for text in expected)
    ]


PLAYER = f"document.querySelector('{LAB} .ss-step').parentNode.player"


def test_one_press_plays_the_predicted_step_and_shows_the_measured_one_below_it(lab):
    lab.run_all()
    wait_for(lab, IS_LIVE)
    lab.page.locator(f"{LAB} .ss-what", has_text="What will happen").wait_for(timeout=120_000)
    lab.page.locator(f"{LAB} .ss-presets button", has_text="Watch a ring").click()
    lab.page.locator(f"{LAB} .ss-presets + div", has_text="Each rank passes a chunk").wait_for(
        timeout=120_000
    )
    lab.page.wait_for_function(f"() => {PLAYER}.model.get('position') > 0.01")
    assert lab.page.evaluate(f"{PLAYER}.step.origin") == "predicted"
    lab.page.wait_for_function(f"() => {PLAYER}.steps.length === 2", timeout=120_000)
    assert lab.page.evaluate(f"{PLAYER}.root.offsetHeight") <= 700
    lab.page.locator(LAB).get_by_role("tab", name="Live").click()
    wait_for(lab, MOVING)
    lab.page.locator(f"{LAB} .ss-advice", has_text="of the step").wait_for(timeout=120_000)
    lab.page.locator(f"{LAB} .ss-right .js-plotly-plot").nth(2).scroll_into_view_if_needed()
    button = lab.page.locator(f"{LAB} .ss-buttons button", has_text="Start").bounding_box()
    assert 0 < button["y"] < lab.page.viewport_size["height"]
    press(lab, "Stop")
    status(lab, "was stopped")


def test_a_restarted_kernel_leaves_one_banner_and_the_cell_attaches_to_the_run_again(lab):
    lab.run_all()
    wait_for(lab, IS_LIVE)
    lab.reload()  # a restart that follows a reload was missed once
    wait_for(lab, IS_LIVE)
    lab.kernel(START_DETACHED)
    wait_for(lab, MOVING)
    lab.restart_kernel()
    wait_for(lab, IS_GONE)
    assert lab.page.evaluate(STATE)["banners"] == [BANNER]
    lab.reload()
    wait_for(lab, IS_GONE)

    def is_gone():
        gone = {"lab": False, "banners": [SAVED], "broken": 0, "canStart": False}
        assert lab.page.evaluate(STATE) == gone

    eventually(lab.page, is_gone)
    lab.run_all()
    wait_for(lab, IS_LIVE)
    status(lab, "is running")
    wait_for(lab, MOVING)
    press(lab, "Stop")
    status(lab, "was stopped")
    forget_missing_models(lab)


@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_no_restart_and_no_reload_loses_the_lab(lab):
    lab.run_all()
    wait_for(lab, IS_LIVE)
    lost, started = [], time.monotonic()
    for number in range(1, LEAST_RELOADS + 1):
        is_gone = number % (LEAST_RELOADS // LEAST_RESTARTS) == 0
        if is_gone:
            lab.restart_kernel()
            if not _comes(lab, IS_GONE):
                lost.append((number, "restart", lab.page.evaluate(STATE)))
        lab.reload(timeout_ms=90_000)
        if not _comes(lab, IS_GONE if is_gone else IS_LIVE):
            lost.append((number, "reload", lab.page.evaluate(STATE)))
        if is_gone:
            lab.run_all()
            if not _comes(lab, IS_LIVE):
                lost.append((number, "run again", lab.page.evaluate(STATE)))
    print(
        f"{LEAST_RELOADS} reloads and {LEAST_RESTARTS} restarts in {time.monotonic() - started:.0f} s: {lost}"
    )
    forget_missing_models(lab)
    assert lost == []
    assert lab.page.evaluate(KERNEL_IDLE)


def _comes(lab, condition):
    from playwright.sync_api import TimeoutError as PlaywrightTimeout

    try:
        wait_for(lab, condition, 30_000)
    except PlaywrightTimeout:
        return False
    return True
