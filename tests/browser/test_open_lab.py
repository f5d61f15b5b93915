"""A person at an open Training Lab, in a narrow window and with a change that follows a run."""

from __future__ import annotations

from functools import partial

import pytest

from browser.chromium import VIEWPORT
from browser.notebook_page import eventually
from browser.test_first_screen import IS_LIVE, wait_for, written
from browser.test_training_lab import LAB, status
from conformance.runs import SHORT_TEXT

SHORTER = (
    "__import__('shardscope_widgets.training_lab._presets', fromlist=['of'])"
    f".preset_named('Break the bubble').choices.update(steps=24, data={SHORT_TEXT!r})"
)
"""On a short text: an evaluation takes emulated ranks as long as many steps."""


@pytest.fixture(scope="module")
def lab(shared_notebook, tmp_path_factory):
    """A lab that is shown; what one test has done with it, the next one finds."""
    shared_notebook.open(written(tmp_path_factory.mktemp("lab"))).run_all()
    wait_for(shared_notebook, IS_LIVE)
    return shared_notebook


def test_nothing_overlaps_in_a_narrow_window(lab):
    for width in (1400, 900, 600):
        lab.page.set_viewport_size({"width": width, "height": 1100})
        eventually(lab.page, partial(nothing_overlaps, lab.page))
        lab.page.wait_for_timeout(700)  # figures follow the width
        eventually(lab.page, partial(nothing_overlaps, lab.page))
    lab.page.set_viewport_size(VIEWPORT)


def nothing_overlaps(page):
    sides = page.evaluate(
        f"() => ['.ss-left', '.ss-right', '.ss-first'].map(side => document.querySelector('{LAB} ' + side))"
        ".map(node => node.getBoundingClientRect()).map(box => [box.left, box.right, box.top, box.bottom])"
    )
    (left, right, first), width = sides, page.viewport_size["width"]
    assert all(box[1] <= width for box in sides), width
    assert first[3] <= left[2], width
    beside, below = right[0] >= left[1], right[2] >= left[3]
    assert beside if width == 1400 else below, width


def test_a_change_chosen_during_a_run_follows_it_while_the_advice_keeps_its_place(lab):
    lab.kernel(SHORTER)
    lab.page.locator(f"{LAB} .ss-presets button", has_text="Break the bubble").click()
    lab.page.locator(f"{LAB} .ss-presets + div", has_text="stages wait for each other").wait_for()
    advice = lab.page.locator(f"{LAB} .ss-advice").first
    advice.locator("button", has_text="Run it").click()
    advice.locator("button", has_text="Will run when this run ends or is stopped").wait_for()
    height = advice.bounding_box()["height"]
    advice.get_by_text("has started. Where its step time goes is shown here").wait_for()
    assert advice.bounding_box()["height"] >= height
    assert lab.kernel("[[run.state for run in lab.runs][1:], lab.run.baseline == lab.runs[1].id]") == [
        ["completed"],
        True,
    ]
    lab.page.locator(f"{LAB} .ss-advice b", has_text="before").wait_for()
    assert "stages wait" in lab.page.locator(f"{LAB} .ss-presets + div").inner_text()
    status(lab, "has finished")
