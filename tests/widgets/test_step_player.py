"""The step player without a browser: its values, its page and its picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import shardscope as ss
from shardscope_widgets import StepPlayer


@pytest.fixture(scope="module")
def step():
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=4)
    return ss.simulate.step_events(job)


def test_it_shows_a_predicted_step(step):
    player = StepPlayer(step)
    shown = player.events
    assert (shown["shape"], shown["world_size"], len(shown["events"])) == ("ring", 4, len(step.events))
    assert set(shown["looks"]) == {event.kind for event in step.events}
    assert (player.position, player.playing, player.selected, player.measured) == (0.0, True, -1, {})


def test_a_measured_step_is_added_below_while_the_first_one_plays_on(step):
    player = StepPlayer(step)
    player.playing = False
    player.add(replace(step, origin="measured", step_time_s=2 * step.step_time_s))
    assert (player.events["origin"], player.measured["origin"]) == ("predicted", "measured")
    assert player.playing is False
    player.show(step)
    assert (player.measured, player.playing) == ({}, True)


def test_without_a_step_it_shows_a_hint_and_writes_nothing(tmp_path):
    player = StepPlayer()
    assert player.events == {}
    with pytest.raises(ss.SpecError, match="shows no step"):
        player.html(tmp_path / "step.html")


def test_its_page_is_small_and_needs_no_network(step, tmp_path):
    page = tmp_path / "step.html"
    StepPlayer(step).html(page)
    text = page.read_text()
    assert page.stat().st_size < 100_000
    assert not re.search(r"(?:src|href)=|https?://|import ", text)
    assert "plotly" not in text.lower()


def test_a_label_cannot_end_the_script_of_its_page(step, tmp_path):
    page = tmp_path / "step.html"
    StepPlayer(replace(step, label="<!-- <script> </script>")).html(page)
    text = page.read_text()
    assert text.count("<script") == text.count("</script>")
    assert "<!--" not in text


def test_its_picture_is_a_small_animated_svg_with_one_packet_for_each_message(step, tmp_path):
    path = tmp_path / "step.svg"
    StepPlayer(step).picture(path)
    root = ET.parse(path).getroot()
    assert path.stat().st_size < 200_000
    assert len(root.findall(".//{*}animateMotion")) == len(step.messages)
    for animation in root.findall(".//{*}animate"):
        keys = [float(key) for key in animation.get("keyTimes").split(";")]
        assert keys == sorted(keys)
        assert len(keys) == len(animation.get("values").split(";"))
        assert keys[0] == 0


def test_a_picture_of_many_ranks_is_refused(tmp_path):
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=16)
    with pytest.raises(ss.SpecError, match="at most 8 ranks"):
        StepPlayer(ss.simulate.step_events(job)).picture(tmp_path / "step.svg")


def test_the_javascript_is_a_string():
    assert isinstance(StepPlayer._esm, str)
    assert StepPlayer._esm.rstrip().endswith("export default { render };")
