"""The step player's page in a real browser: it plays, scrubs, steps by keyboard and explains events."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope_widgets import StepPlayer

PLAYER = "document.getElementById('player').player"


@pytest.fixture(scope="module")
def page(browser_context, tmp_path_factory):
    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=4, batch=16)
    path = tmp_path_factory.mktemp("player") / "step.html"
    StepPlayer(ss.simulate.step_events(job)).html(path)
    page = browser_context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None
    )
    page.goto(f"file://{path}")
    page.wait_for_function(f"{PLAYER}?.look")
    yield page
    page.close()
    assert not errors


def value(page, name):
    return page.evaluate(f"{PLAYER}.model.get({name!r})")


def test_it_plays_by_itself_and_pauses(page):
    page.wait_for_function(f"{PLAYER}.model.get('position') > 0.01")
    page.get_by_role("button", name="Pause").click()
    assert value(page, "playing") is False
    page.keyboard.press("Home")
    assert value(page, "position") == 0


def test_arrow_keys_move_between_events_and_home_and_end_to_the_ends(page):
    page.locator(".ss-step").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    at = value(page, "position")
    assert 0 < at < 1
    page.keyboard.press("ArrowLeft")
    assert value(page, "position") < at
    page.keyboard.press("End")
    assert value(page, "position") == 1
    assert "The step is complete." in page.locator(".now").inner_text()
    page.keyboard.press("Space")
    assert value(page, "playing") is True
    page.keyboard.press("Space")
    assert value(page, "playing") is False


def test_a_selected_message_is_explained_in_a_sentence(page):
    page.evaluate(
        f"""() => {{ const p = {PLAYER}, m = p.step.messages[0];
        p.jump(p.step.clock.position((m.start + m.end) / 2)); }}"""
    )
    x, y = page.evaluate(f"(() => {{ const hit = {PLAYER}.hits[0]; return [hit.x, hit.y]; }})()")
    page.locator(".stage canvas").click(position={"x": x, "y": y})
    assert value(page, "selected") >= 0
    words = page.locator(".now .chosen").inner_text()
    assert words.startswith("Rank 0 sends chunk 3 of the gradients, 221 kB, to rank 1")


def test_all_of_it_fits_below_700_pixels_with_the_play_button_above_the_ranks(page):
    box = page.locator(".ss-step").bounding_box()
    assert box["height"] <= 700
    assert page.locator(".play").bounding_box()["y"] < page.locator(".stage").bounding_box()["y"]


def test_a_cell_is_explained_in_a_sentence(page):
    page.evaluate(f"{PLAYER}.jump(1)")
    x, y = page.evaluate(f"(() => {{ const box = {PLAYER}.boxes[0]; return [box.x + 5, box.y + 5]; }})()")
    page.locator(".stage canvas").hover(position={"x": x, "y": y})
    words = page.locator(".now .chosen").inner_text()
    assert words == "Rank 0, chunk 0 of the gradients: complete, the sum over all 4 ranks."


def test_a_measured_step_is_drawn_below_and_can_be_played(page):
    page.evaluate(
        f"""() => {{ const model = {PLAYER}.model, step = model.get('events');
        model.set('measured', {{...step, origin: 'measured', duration_us: 1.5 * step.duration_us}}); }}"""
    )
    page.get_by_role("button", name="Play the measured step").click()
    assert page.evaluate(f"{PLAYER}.step.origin") == "measured"
    page.wait_for_function(f"{PLAYER}.shown === 1")
    assert page.locator(".ss-step").bounding_box()["height"] <= 700
    page.evaluate(f"{PLAYER}.model.set('measured', {{}})")


def test_it_stacks_in_a_narrow_window(page):
    page.set_viewport_size({"width": 600, "height": 900})
    page.wait_for_function("document.querySelector('.ss-step').classList.contains('narrow')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
