"""A person compresses a run in the lab and sees, beside the uncompressed one, what that saved and what it cost."""

from __future__ import annotations

import pytest

from browser.test_architectures_lab import lab, wait_for_bars  # noqa: F401 - a fixture
from browser.test_training_lab import CONTRAST, LAB, choose, press, status


def run_to_its_end(lab):  # noqa: F811
    press(lab, "Start")
    label = lab.kernel("lab._focus_trace().label")
    status(lab, f"{label} has finished", 60_000)


@pytest.mark.timeout(180)
def test_a_compressed_run_stands_beside_an_uncompressed_one(lab):  # noqa: F811
    choose(lab, "Strategy", "ring")
    run_to_its_end(lab)
    choose(lab, "Compression", "int8")
    choose(lab, "Exchange", "gather")
    assert lab.kernel("lab.job().compression.label") == "int8 exchange=gather"
    run_to_its_end(lab)
    wait_for_bars(lab, "Compression", 2 + 3 * 2)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.use_theme(theme)
        ratios = lab.page.evaluate(
            CONTRAST, f"{LAB} .js-plotly-plot .ytick text, {LAB} .js-plotly-plot .legendtext"
        )
        assert min(ratios) >= 4.5, f"{theme}: {min(ratios):.2f}"
