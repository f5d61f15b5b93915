"""The picture of a panel that stays in a saved notebook, and the SVG that its figures are drawn as."""

from __future__ import annotations

import base64
import gzip
import re
import time
from xml.etree import ElementTree as ET

import pytest
from IPython.core.interactiveshell import InteractiveShell

import shardscope as ss
from shardscope_widgets import (
    CommunicationCalculator,
    FaultLab,
    MemoryCalculator,
    PipelineExplorer,
    Planner,
    StepPlayer,
    TuningLab,
    Twin,
)
from shardscope_widgets.kit import still
from shardscope_widgets.kit.live_figure import library_code
from shardscope_widgets.kit.svg import figure_svg
from shardscope_widgets.kit.svg.axis import Axis
from shardscope_widgets.kit.svg.text import text_svg

SVG = "{http://www.w3.org/2000/svg}"
IMAGE = re.compile(r'<img alt="[^"]+" src="data:image/svg\+xml;base64,([^"]+)">')
MOST_BYTES = 60_000
"""Largest picture of a panel, as HTML."""


def drawn(html):
    """The images of a picture, as parsed SVG."""
    return [ET.fromstring(base64.b64decode(data)) for data in IMAGE.findall(html)]


def texts(image):
    return ["".join(text.itertext()) for text in image.iter(f"{SVG}text")]


def step():
    return ss.simulate.step_events(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=2))


@pytest.mark.parametrize(
    ("panel", "said", "labelled"),
    [
        (lambda: MemoryCalculator(model="gpt2-xl", data=2), "Fits, with", "activations"),
        (lambda: CommunicationCalculator(workers=16), "hierarchical", "message size"),
        (lambda: PipelineExplorer(schedule="zbv"), "bubble 5.9%", "milliseconds"),
        (lambda: Planner(model="gpt2-xl", nodes=1), "gpt2-xl fits on 8 devices", "node 0"),
        (lambda: StepPlayer(step()), "a step takes", "rank 1"),
    ],
    ids=["memory", "communication", "pipeline", "planner", "step"],
)
def test_a_picture_has_the_verdict_and_the_figure_and_is_small(panel, said, labelled):
    html = panel()._still()
    assert said in html
    assert any(labelled in text for image in drawn(html) for text in texts(image))
    assert len(html) < MOST_BYTES
    assert "<svg" not in IMAGE.sub("", html).replace("<svg class=", "")  # viewers remove inline figures


@pytest.mark.parametrize("panel", [FaultLab, Twin, lambda root: TuningLab(name="none", root=root)])
def test_a_panel_without_a_run_leaves_its_status_and_no_image(panel, tmp_path):
    opened = panel(root=tmp_path)
    html = opened._still()
    opened.close()
    assert "ss-status" in html
    assert drawn(html) == []


def test_a_player_without_a_step_says_so():
    assert "No step has been recorded yet" in StepPlayer()._still()


def test_only_the_open_tab_is_in_the_picture():
    panel = CommunicationCalculator()
    assert len(drawn(panel._still())) == 1
    panel.tabs.selected_index = list(panel.tabs.titles).index("Who sends to whom")  # drawn as HTML
    assert drawn(panel._still()) == []


def test_what_is_hidden_is_not_in_the_picture():
    panel = MemoryCalculator(model="gpt2-xl")
    panel.tensor = 3  # does not divide the heads
    assert drawn(panel._still()) == []
    assert "invalid" in panel._still()


@pytest.fixture
def shell(monkeypatch):
    """A shell that notes what is displayed, and which outputs are replaced."""
    shell, notes = InteractiveShell(), []
    monkeypatch.setattr(still, "get_ipython", lambda: shell)
    monkeypatch.setattr(still, "display", lambda data, **more: notes.append((data, more.get("display_id"))))
    monkeypatch.setattr(
        still, "update_display", lambda data, **more: notes.append((data, more["display_id"]))
    )
    monkeypatch.setattr(still, "_shown", type(still._shown)())
    return shell, notes


def test_the_picture_is_a_second_output_that_is_hidden_while_the_panel_lives(shell):
    panel = PipelineExplorer()
    panel._ipython_display_()
    (live, _), (saved, name) = shell[1]
    assert "application/vnd.jupyter.widget-view+json" in live
    assert live["text/plain"] == repr(panel)
    assert repr(panel).startswith("PipelineExplorer: Step time 330 ms, bubble 27.3%")
    assert name
    assert panel._still() in saved["text/html"]
    hidden = f"body:has(.ss-live-{panel.model_id}) .ss-still-{panel.model_id}{{display:none}}"
    assert hidden in saved["text/html"]
    assert f"ss-live-{panel.model_id}" in panel._dom_classes


def test_a_cell_that_changes_a_panel_changes_its_picture(shell):
    panel = PipelineExplorer()
    panel._ipython_display_()
    shell[0].events.trigger("post_run_cell", None)
    assert len(shell[1]) == 2  # nothing has changed
    panel.stages = 6
    shell[0].events.trigger("post_run_cell", None)
    panel._timer.cancel()
    assert len(shell[1]) == 3
    assert "6 ranks" in shell[1][-1][0]["text/html"]
    assert shell[1][-1][1] == shell[1][1][1]


def test_a_slider_changes_the_picture_a_little_later(shell, monkeypatch):
    monkeypatch.setattr(still, "PUBLISH_EVERY_S", 0.01)
    panel = PipelineExplorer()
    panel._ipython_display_()
    panel.stages = 6
    panel._timer.join(5)
    assert "6 ranks" in shell[1][-1][0]["text/html"]


def test_a_change_while_the_picture_is_drawn_is_not_lost(shell, monkeypatch):
    monkeypatch.setattr(still, "PUBLISH_EVERY_S", 0.01)
    panel = PipelineExplorer()
    panel._ipython_display_()
    draw = panel._still

    def draw_late():
        picture = draw()
        panel.stages = 6 if panel.stages == 5 else panel.stages
        return picture

    panel._still = draw_late
    panel.stages = 5
    deadline = time.monotonic() + 5
    while "6 ranks" not in shell[1][-1][0]["text/html"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "6 ranks" in shell[1][-1][0]["text/html"]


def test_only_what_the_picture_shows_starts_a_timer(shell):
    panel = PipelineExplorer()
    panel._ipython_display_()
    panel.layout = {"width": "50%"}
    assert panel._timer is None


def test_a_closed_panel_starts_no_timer_and_the_cell_publishes_its_last_change(shell):
    panel = PipelineExplorer()
    panel._ipython_display_()
    panel.close()
    panel.stages = 6
    assert panel._timer is None
    shell[0].events.trigger("post_run_cell", None)
    assert "6 ranks" in shell[1][-1][0]["text/html"]


def test_a_picture_is_drawn_under_the_lock_of_the_panel_and_its_errors_are_shown_there(shell, tmp_path):
    panel = FaultLab(root=tmp_path)
    panel._ipython_display_()

    def fail():
        assert panel._guard.lock._is_owned()
        raise RuntimeError("torn trace")

    panel._kept = fail
    panel._publish()
    assert "RuntimeError: torn trace" in panel.problem
    panel.close()


def test_a_panel_is_displayed_without_a_figure_that_cannot_be_drawn(shell, monkeypatch, caplog):
    panel = PipelineExplorer()
    monkeypatch.setattr("shardscope_widgets.kit.live_figure.figure_svg", lambda *_args, **_more: 1 / 0)
    panel._ipython_display_()
    saved = shell[1][1][0]["text/html"]
    assert "bubble 27.3%" in saved
    assert drawn(saved) == []
    assert "is missing in a picture" in caplog.text
    panel._kept = lambda: 1 / 0  # no part can be drawn, and this panel does not show errors
    panel._publish()
    assert "a picture could not be drawn: ZeroDivisionError" in caplog.text


class TestSvg:
    def test_what_is_not_finite_has_no_colour(self):
        scale = [[0, "#000000"], [1, "#ffffff"]]
        marker = {"color": [float("nan"), 1.0], "colorscale": scale, "cmin": 0, "cmax": 1}
        points = {"type": "scatter", "mode": "markers", "x": [1, 2], "y": [1, 2], "marker": marker}
        figure_svg({"data": [points], "layout": {}})
        cells = {"type": "heatmap", "colorscale": scale, "zmin": 0, "zmax": 1}
        image = ET.fromstring(
            figure_svg({"data": [cells | {"z": [[float("nan"), 1.0, None]]}], "layout": {}})
        )
        assert [each.get("fill") for each in image.iter(f"{SVG}rect")].count("#ffffff") == 1
        assert "#000000" not in [each.get("fill") for each in image.iter(f"{SVG}rect")]
        figure_svg({"data": [cells | {"z": []}], "layout": {}})

    def test_bars_stack_from_left_to_right(self):
        layout = {"height": 400, "barmode": "stack", "xaxis": {"range": [0, 10]}}
        bars = [
            {
                "type": "bar",
                "orientation": "h",
                "x": [size],
                "y": ["a"],
                "name": name,
                "marker": {"color": colour},
            }
            for size, name, colour in ((4, "one", "#111111"), (6, "two", "#222222"))
        ]
        image = ET.fromstring(figure_svg({"data": bars, "layout": layout}))
        shown = [each for each in image.iter(f"{SVG}g") if each.get("fill") in {"#111111", "#222222"}]
        first, second = (group[0] for group in shown)
        assert float(second.get("width")) / float(first.get("width")) == pytest.approx(1.5, rel=0.01)
        assert float(first.get("x")) + float(first.get("width")) == pytest.approx(
            float(second.get("x")), abs=0.2
        )
        assert {"one", "two", "a"} <= set(texts(image))

    def test_a_line_ends_at_a_gap(self):
        line = {"type": "scatter", "mode": "lines", "x": [1, 2, 3, 4, 5], "y": [1, 2, None, 2, 1]}
        image = ET.fromstring(figure_svg({"data": [line], "layout": {}}))
        path = next(each.get("d") for each in image.iter(f"{SVG}path") if each.get("fill") == "none")
        assert (path.count("M"), path.count("L")) == (2, 2)

    def test_a_type_that_is_not_drawn_is_refused(self):
        with pytest.raises(ValueError, match="traces of type pie cannot be drawn as SVG"):
            figure_svg({"data": [{"type": "pie"}], "layout": {}})

    def test_text_is_escaped_and_keeps_its_emphasis(self):
        text = ET.fromstring(text_svg("<b>a &lt; b</b> &amp; 5 < 6<br>next", 0, 0))
        assert "".join(text.itertext()) == "a < b & 5 < 6next"
        assert [len(list(span)) for span in text] == [1, 0]

    @pytest.mark.parametrize(
        ("settings", "values", "labels"),
        [
            ({}, [0, 100], ["0", "20", "40", "60", "80", "100"]),
            ({"ticksuffix": " GiB", "tickvals": [1, 2]}, [0, 3], ["1 GiB", "2 GiB"]),
            ({"tickformat": ".0%", "range": [0, 1], "dtick": 0.5}, [0, 1], ["0%", "50%", "100%"]),
            ({"type": "log"}, [1, 1000], ["1", "10", "100", "1000"]),
            ({"tickformat": "~s"}, [0, 2e6], ["0", "500k", "1M", "1.5M", "2M"]),
            ({}, ["ring", "tree"], ["ring", "tree"]),
        ],
    )
    def test_ticks_are_round(self, settings, values, labels):
        axis = Axis("x", settings, values, is_padded=False)
        axis.pixels = (0.0, 500.0)
        assert [text for _, text in axis.ticks()] == labels

    def test_a_reversed_axis_runs_backwards(self):
        axis = Axis("y", {"autorange": "reversed"}, ["a", "b"], is_padded=False)
        axis.pixels = (100.0, 0.0)
        assert axis.at("a") < axis.at("b")


def test_the_script_that_executed_notebooks_store_is_compressed_and_whole():
    packed = library_code()
    assert len(packed) < 2_500_000
    code = gzip.decompress(base64.b64decode(packed)).decode()
    assert len(code) > 4_000_000
    assert "module.exports.figureConfig = function" in code


class Broken(still.Still):
    _guard = still.Still._guard

    def _kept(self):
        raise ValueError("a part is missing")


def test_a_panel_whose_parts_fail_still_has_a_name(caplog):
    assert repr(Broken()) == "Broken: "
    assert "a part is missing" in caplog.text
