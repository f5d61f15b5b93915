"""A reader opens the page offline and asks the calculators: they answer as the same widgets do in a notebook."""

from __future__ import annotations

import re

import ipywidgets as widgets
import pytest

import shardscope_widgets
from browser.notebook_page import eventually
from shardscope_widgets.kit.live_figure import LiveFigure

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(600)]

ASKED = {
    "memory": ("MemoryCalculator", [{"zero": 2}, {"micro_batch": 4, "data": 64}]),
    "communication": (
        "CommunicationCalculator",
        [{"workers": 250}, {"op": "all_gather", "latency_us": 20.0}],
    ),
    "pipeline": ("PipelineExplorer", [{"schedule": "zbv"}, {"stages": 6, "microbatches": 18}]),
    "planner": ("Planner", [{"nodes": 16}, {"precision": "fp16-mixed"}]),
}
"""For each panel its widget, and settings that a reader makes one after another."""
SHOWN = """id => {
    const panel = document.querySelector(`#panel-${id}`);
    return {
        texts: [...panel.querySelectorAll(".widget-html-content")].map(node => node.textContent),
        figures: [...panel.querySelectorAll(".js-plotly-plot")].map(node => node.data).filter(data => data.length),
    };
}"""
WATCH_DATA = """() => {
    const labels = [...document.querySelectorAll("#panel-memory .widget-label")];
    const row = labels.find(label => label.textContent === "Data ranks").parentNode;
    window.readouts = [];
    new MutationObserver(changes => window.readouts.push(...changes.map(({ target }) => target.textContent)))
        .observe(row.querySelector(".widget-readout"), { childList: true, characterData: true, subtree: true });
}"""
"""Note every value that the slider "Data ranks" shows from now on."""
AS_TEXT = """texts => texts.map(text => {
    const place = document.createElement("div");
    place.innerHTML = text;
    return place.textContent;
})"""


def open_panel(page, site, panel, settings="", *, anew=True):
    """Show a panel that nobody has used yet; a page that is not opened anew keeps the Python that it has started."""
    if anew or page.evaluate("panel => performance.getEntriesByName(`shown-${panel}`).length", panel):
        page.goto("about:blank")  # an address that differs in its panel alone keeps what was set there
    page.goto(f"{site}#{panel}{settings}")
    page.wait_for_function(f"() => performance.getEntriesByName('shown-{panel}').length > 0")
    page.wait_for_selector(f"#panel-{panel} .js-plotly-plot .main-svg")


def all_of(widget, kind):
    """Every widget of a kind inside a widget, in the order in which they are shown, but the run of a plan, which the
    page cannot launch.
    """
    if "ss-trained" in getattr(widget, "_dom_classes", ()):
        return []
    found = [widget] if isinstance(widget, kind) else []
    return found + [each for child in getattr(widget, "children", ()) for each in all_of(child, kind)]


def controls_of(widget):
    for name, control in widget.controls.items():
        yield from control.items() if isinstance(control, dict) else [(name, control)]


def set_control(page, panel, control, value):
    """Set a control as a reader does: find it by its label; choose, type, or press the slider's arrow keys."""
    label = page.locator(
        f"#panel-{panel} .widget-label", has_text=re.compile(f"^{re.escape(control.description)}$")
    )
    row = label.first.locator("..")
    if isinstance(control, widgets.Dropdown):
        row.locator("select").select_option(index=[option for _, option in pairs(control)].index(value))
    elif isinstance(control, widgets.SelectionSlider):
        steps = [option for _, option in pairs(control)].index(value) - control.index
        for _ in range(abs(steps)):
            row.locator(".noUi-handle").press("ArrowRight" if steps > 0 else "ArrowLeft")
    else:
        box = row.locator("input, .widget-readout").last
        box.fill(str(value))
        box.press("Enter")


def pairs(control):
    return [each if isinstance(each, tuple) else (str(each), each) for each in control.options]


def same_numbers(shown, expected):
    """Compare a figure of the page with one of Python: all that Python sent, floats to the last digits but three."""
    if isinstance(expected, dict):
        assert isinstance(shown, dict)
        assert set(shown) >= set(expected)
        for key, value in expected.items():
            same_numbers(shown[key], value)
    elif isinstance(expected, (list, tuple)):
        assert shown is not None
        assert len(shown) == len(expected)
        for one, other in zip(shown, expected, strict=True):
            same_numbers(one, other)
    elif isinstance(expected, float):
        assert shown == pytest.approx(expected, rel=1e-12, abs=1e-12)
    else:
        assert shown == (expected.tolist() if hasattr(expected, "tolist") else expected)


def agree(page, panel, widget):
    """The panel shows the texts and figures of the widget, once the page has handled what was asked of it."""
    texts = page.evaluate(AS_TEXT, [each.value for each in all_of(widget, widgets.HTML)])
    figures = [each.figure["data"] for each in all_of(widget, LiveFigure) if each.figure["data"]]
    assert figures

    def is_shown():  # a panel writes its texts before it draws its figures
        shown = page.evaluate(SHOWN, panel)
        assert shown["texts"] == texts
        assert len(shown["figures"]) == len(figures)
        for one, other in zip(shown["figures"], figures, strict=True):
            same_numbers(one, other)

    eventually(page, is_shown)


@pytest.mark.parametrize("panel", ASKED)
def test_a_panel_answers_as_its_widget_does_in_a_notebook(page, site, panel):
    name, settings = ASKED[panel]
    open_panel(page, site, panel, anew=False)
    widget = getattr(shardscope_widgets, name)()
    agree(page, panel, widget)
    for asked in settings:
        controls = dict(controls_of(widget))
        for field, value in asked.items():
            set_control(page, panel, controls[field], value)
            setattr(widget, field, value)
        agree(page, panel, widget)


def test_a_panel_is_shown_before_python_has_started_and_answers_what_was_changed_meanwhile(page, site):
    released = []
    page.route("**/pyodide.mjs", lambda route: released.append(route))  # noqa: PLW0108 - Playwright marks its handlers
    open_panel(page, site, "memory")
    widget = shardscope_widgets.MemoryCalculator()
    agree(page, "memory", widget)
    controls = dict(controls_of(widget))
    set_control(page, "memory", controls["zero"], 3)
    page.wait_for_function("() => document.body.classList.contains('computing')")
    set_control(page, "memory", controls["data"], 64)
    page.evaluate(WATCH_DATA)
    assert page.evaluate("() => performance.getEntriesByName('live-memory').length") == 0
    (held_back,) = released
    held_back.continue_()
    page.unroute("**/pyodide.mjs")  # which would let go of it, too, and turns the cache on again
    widget.zero, widget.data = 3, 64
    agree(page, "memory", widget)
    assert page.evaluate("() => window.readouts") == []  # a slider never returns to an earlier value
    assert page.evaluate("() => performance.getEntriesByName('live-memory').length") == 1


@pytest.mark.parametrize("panel", ASKED)
def test_a_picture_of_a_panel_is_in_the_page_itself(chromium, site, panel):
    page, widget = chromium.new_page(), getattr(shardscope_widgets, ASKED[panel][0])()
    page.route(re.compile(r"\.m?js$"), lambda route: route.abort())
    page.goto(f"{site}#{panel}")
    verdict = page.evaluate(AS_TEXT, [all_of(widget.children[1], widgets.HTML)[0].value])
    shown = page.locator(".picture:visible")
    assert shown.count() == 1
    assert shown.locator(".ss-status").all_text_contents() == verdict
    assert page.evaluate("() => document.querySelector('.picture:not([hidden]) img').naturalWidth") > 300
    page.close()


def test_a_panel_takes_the_place_of_its_picture(page, site):
    open_panel(page, site, "pipeline")
    page.wait_for_function("() => !document.querySelector('.picture[data-panel=pipeline]')")
    page.get_by_role("link", name="Memory").click()
    page.wait_for_function("() => !document.querySelector('.picture[data-panel=memory]')")
    assert page.locator(".picture:visible").count() == 0


def test_an_address_carries_the_settings_of_a_panel(page, site):
    open_panel(page, site, "pipeline", '?schedule="gpipe"&stages=8')
    agree(page, "pipeline", shardscope_widgets.PipelineExplorer(schedule="gpipe", stages=8))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#panel-pipeline").get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    link = page.evaluate("() => navigator.clipboard.readText()")
    assert link == f"{site}#pipeline?schedule=%22gpipe%22&stages=8"
    assert link == page.url  # a browser writes quotes so, too: this is what was opened above


def test_nothing_is_wider_than_a_phone(page, site):
    page.set_viewport_size({"width": 600, "height": 900})
    for panel in ASKED:
        open_panel(page, site, panel, anew=False)
        page.wait_for_function("() => document.documentElement.scrollWidth <= 600")


def test_a_rendered_notebook_draws_its_figures_and_links_to_the_panel(page, site):
    page.goto(f"{site}notebooks/03-memory.html")
    page.locator(".figure").first.scroll_into_view_if_needed()
    page.wait_for_selector(".figure .main-svg")
    page.get_by_role("link", name="Open it here").click()
    page.wait_for_selector("#panel-memory .js-plotly-plot .main-svg")


def test_a_predicted_step_plays(page, site):
    page.goto("about:blank")
    page.goto(f"{site}#step")
    page.get_by_role("button", name="ZeRO-3").click()
    frame = page.locator("iframe").element_handle().content_frame()
    frame.wait_for_url("**/steps/zero-3.html")
    frame.wait_for_function("() => Number(document.querySelector('input[type=range]').value) > 0.02")
