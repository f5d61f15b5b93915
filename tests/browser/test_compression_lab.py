"""A person compresses a run in the lab and sees, beside the uncompressed one, what that saved and what it cost."""

from __future__ import annotations

import pytest

from browser.test_architectures_lab import lab, wait_for_bars  # noqa: F401 - a fixture
from browser.test_training_lab import LAB, choose, started, status

pytestmark = pytest.mark.weekly

UNNAMED = f"""() => [...document.querySelectorAll('{LAB} .ss-controls :is(select, input)')]
    .filter(node => !node.getAttribute('aria-label') && ![...node.labels].some(label => label.textContent.trim()))
    .length"""


def run_to_its_end(lab):  # noqa: F811
    started(lab)
    label = lab.kernel("lab._focus_trace().label")
    status(lab, f"{label} has finished", 60_000)


def test_a_compressed_run_stands_beside_an_uncompressed_one(lab):  # noqa: F811
    choose(lab, "Strategy", "ring")
    run_to_its_end(lab)
    choose(lab, "Compression", "int8")
    choose(lab, "Exchange", "gather")
    lab.until("lab.job().compression.label", "int8 exchange=gather")
    run_to_its_end(lab)
    wait_for_bars(lab, "Compression", 2 + 3 * 2)
    assert lab.page.locator(LAB).get_by_role("group", name="Compression").is_visible()
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.use_theme(theme)
        lab.can_be_read(f"{LAB} .js-plotly-plot .ytick text, {LAB} .js-plotly-plot .legendtext")


def test_what_a_method_does_not_take_is_said_beside_its_control_and_a_link_shows_its_latency(lab):  # noqa: F811
    choose(lab, "Compression", "topk")
    ratio = lab.page.locator(LAB).get_by_role("spinbutton", name="Ratio")
    ratio.fill("3")
    ratio.press("Tab")
    lab.page.locator(LAB).get_by_role("alert").filter(has_text="ratio=3.0 is not valid").wait_for(
        timeout=60_000
    )
    assert (ratio.input_value(), lab.kernel("lab.compression_options")) == ("0.01", {})
    ratio.fill("0.05")
    ratio.press("Tab")
    lab.page.locator(LAB).get_by_role("alert").wait_for(state="detached", timeout=60_000)
    latency = lab.page.locator(LAB).get_by_role("combobox", name="Latency")
    assert not latency.is_visible()
    choose(lab, "Link", "100 Mbit/s")
    latency.select_option("5 ms")
    assert lab.page.evaluate(UNNAMED) == 0
    lab.until("lab.job().link.label", "100 Mbit/s, 5 ms")
