"""Every panel and every way to display a figure: nothing is uploaded, everything has a name and can be read."""

from __future__ import annotations

import re

import nbformat
import pytest

from browser.notebook_page import eventually

PANELS = ".jp-OutputArea-output :is(.ss-lab, .ss-step)"
CELLS = (
    "import shardscope as ss\nimport shardscope_widgets as sw\nfrom shardscope_widgets import figures",
    'run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=6)).wait(120)',
    'ss.launch(ss.Job(model="mlp", data="digits", strategy="pipeline", world_size=2, steps=6)).wait(120)',
    "sw.MemoryCalculator()",
    "sw.CommunicationCalculator()",
    "sw.PipelineExplorer()",
    'planner = sw.Planner(model="gpt3-175b", nodes=16, global_batch=256)\nplanner',
    "lab = sw.TrainingLab()\nlab",
    "sw.StepPlayer(run)",
    "sw.Lab()",
    'sw.TuningLab(name="none-yet")',
    "sw.Twin(run)",
    "sw.FaultLab(run)",
    "figures.plans(planner.plans)",
    "figures.plan_rejections(planner.plans).show()",
    "sw.summary([run, run])",
    "ss.compare(run)",
    "planner.plans",
    'sw.say("one step costs $15.92, and **all** $1.52 M; `$HOME` is code")',
)
BUTTONS = """() => [...document.querySelectorAll('.js-plotly-plot')].map(plot =>
    [...plot.querySelectorAll('.modebar-btn')].map(button => button.dataset.title))"""
SLIDERS = f"""() => [...document.querySelectorAll('{PANELS} [role=slider]')].map(slider => ({{
    name: slider.getAttribute('aria-label'), value: slider.getAttribute('aria-valuetext'),
    shown: (slider.closest('.ss-sliding')?.querySelector('.ss-value')
        ?? slider.closest('.widget-slider').querySelector('.widget-readout'))?.textContent.trim() }}))"""
BARE = """([ground, names]) => {
    for (const panel of document.querySelectorAll('.ss-lab')) {
        for (const name of names) panel.parentElement.style.setProperty(name, 'initial');
        panel.parentElement.style.background = ground;
    }
    document.body.classList.toggle('told-of-a-change');
}"""
"""Take JupyterLab's colours away from all panels, as a page of another kind does."""
COLOURS = [
    f"--jp-{name}"
    for name in (
        "ui-font-color0", "ui-font-color1", "ui-font-color2", "layout-color0", "layout-color1", "layout-color2",
        "border-color1", "border-color2", "error-color0",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def panels(shared_notebook, tmp_path_factory):
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    written.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path = tmp_path_factory.mktemp("panels") / "panels.ipynb"
    nbformat.write(written, path)
    shared_notebook.page.set_viewport_size({"width": 1400, "height": 9000})  # nothing is left out of the page
    shared_notebook.open(path).run_all()
    shared_notebook.page.wait_for_function(
        f"() => document.querySelectorAll('{PANELS}').length >= 11"  # a Lab has a Training Lab in it
        f" && document.querySelectorAll('.js-plotly-plot .main-svg').length > 18",
        timeout=240_000,
    )
    return shared_notebook


def violations(page, *rules):
    """Serious and critical violations of the panels, by axe-core: of all rules, or of these."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    chosen = {"runOnly": [*rules]} if rules else {}
    found = axe.run(
        page, context=PANELS, options={"resultTypes": ["violations", "passes"], **chosen}
    ).response
    assert len(found["passes"]) > (0 if rules else 10)  # the rules have met something
    return [
        f"{each['id']}: {node['target']} {node['html'][:160]} {[check['message'] for check in node['any'][:1]]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


def test_no_live_panel_is_called_a_picture(panels):
    notes = panels.page.locator(".ss-fallback")
    assert notes.count() == 10
    assert notes.locator("visible=true").count() == 0


def test_no_figure_can_be_uploaded(panels):
    def has_buttons_but_none_to_upload():
        bars = panels.page.evaluate(BUTTONS)
        assert len(bars) >= 8
        assert all(bars)  # each figure has its other buttons
        assert not [
            title for bar in bars for title in bar if "share" in title.lower() or "cloud" in title.lower()
        ]

    eventually(panels.page, has_buttons_but_none_to_upload)


@pytest.mark.parametrize(("kind", "starts"), [("svg", b"<svg"), ("png", b"\x89PNG")])
@pytest.mark.parametrize(
    ("panel", "name"),
    [
        ("ss-memory", "memory-calculator-gpt3-175b-memory-of-each-pipeline-stage"),
        ("ss-explorer", "pipeline-explorer-1f1b-operations-of-each-rank"),
        ("ss-fault-lab", r"fault-lab-\d+-\d+-ring-mlp-what-each-rank-did-and-which-steps-were-lost"),
    ],
)
def test_a_figure_is_saved_as_png_and_as_svg_under_the_name_of_its_panel(panels, panel, name, kind, starts):
    page = panels.page
    with page.expect_download() as saving:
        button = page.locator(f".{panel} .modebar-btn[data-title='Save as {kind.upper()}']").first
        button.dispatch_event("click")
    assert re.fullmatch(rf"{name}\.{kind}", saving.value.suggested_filename)
    assert saving.value.path().read_bytes().startswith(starts)


def test_dollars_in_a_sentence_are_no_formula(panels):
    said = panels.page.locator(".jp-RenderedMarkdown", has_text="one step costs")
    assert said.inner_text() == "one step costs $15.92, and all $1.52 M; $HOME is code"


def test_each_slider_is_named_and_tells_its_value_as_it_is_shown(panels):
    def all_are_named():
        sliders = panels.page.evaluate(SLIDERS)
        assert len(sliders) > 20
        names = [slider["name"] for slider in sliders]
        assert {"Data ranks", "Message", "Overlap", "Memory left"} <= set(names)
        assert all(names)
        assert [s["value"] for s in sliders if s["shown"]] == [s["shown"] for s in sliders if s["shown"]]

    eventually(panels.page, all_are_named)


@pytest.mark.parametrize(
    ("panel", "label", "typed", "said"),
    [
        ("ss-comm", "Workers", "-3", "Workers cannot be -3; 1, the nearest possible value, is used."),
        (
            "ss-memory",
            "Sequence, tokens",
            "abc",
            "Sequence, tokens cannot be abc; it is still the model's own.",
        ),
    ],
)
def test_what_is_typed_but_not_used_is_said_below_its_box_until_it_is_edited(
    panels, panel, label, typed, said
):
    box = panels.page.locator(f".{panel}").get_by_label(label, exact=True)
    before, note = box.input_value(), panels.page.locator(f".{panel} .ss-refused")
    box.fill(typed)
    box.press("Tab")
    note.wait_for()
    assert note.inner_text().startswith(said)
    for valid in ("1024", before):
        box.fill(valid)
        box.press("Tab")
        panels.page.wait_for_timeout(1000)
        assert note.count() == 0
        assert box.input_value() == valid


def test_a_note_compares_with_the_entry_before_and_not_with_what_a_button_set(panels):
    text = panels.page.locator(".ss-memory").get_by_label("Sequence, tokens", exact=True)
    note = panels.page.locator(".ss-memory .ss-refused")
    for typed in ("1024", "abc"):  # the second before the watch of the first ends
        text.fill(typed)
        text.press("Tab")
        panels.page.wait_for_timeout(500)
    assert note.inner_text().startswith("Sequence, tokens cannot be abc; it is still 1024.")
    text.fill("")
    text.press("Tab")
    panels.page.wait_for_timeout(500)
    assert note.count() == 0
    box = panels.page.locator(".ss-comm").get_by_label("Workers", exact=True)
    before = box.input_value()
    box.fill("64")
    box.press("Tab")
    box.evaluate(
        """(box, before) => {
        const button = box.parentElement.appendChild(document.createElement("button"));
        button.onclick = () => { box.value = before; };
        button.click();
        button.remove();
    }""",
        before,
    )
    panels.page.wait_for_timeout(500)
    assert panels.page.locator(".ss-comm .ss-refused").count() == 0
    box.fill(before)
    box.press("Tab")


def test_folded_topics_open_and_close_by_keyboard(panels):
    topic = panels.page.locator(PANELS).get_by_role("button", name="Optimizer").first
    for key, is_open in (("Enter", "true"), ("Space", "false")):
        topic.press(key)
        panels.page.wait_for_function(f"() => document.activeElement.ariaExpanded === '{is_open}'")


def test_only_keys_of_a_slider_are_kept_from_shortcuts_of_the_page(panels):
    """Notebook 7 has shortcuts for arrows and Enter, which would take them."""
    handle = panels.page.locator(".ss-memory").get_by_role("slider", name="Data ranks")
    for key, is_kept in (("ArrowLeft", True), ("Escape", False), ("ArrowRight", True), ("Shift", False)):
        handle.press(key)
        assert handle.evaluate("node => node.hasAttribute('data-lm-suppress-shortcuts')") == is_kept


@pytest.mark.parametrize(("panel", "slider"), [("ss-memory", "Tensor ranks"), ("ss-comm", "Message")])
def test_a_figure_that_is_moved_equals_one_that_is_drawn_anew(panels, panel, slider):
    handle = panels.page.locator(f".{panel}").get_by_role("slider", name=slider)
    before = panels.page.evaluate(PICTURE, panel)
    handle.press("ArrowRight")
    panels.page.wait_for_function(f"args => ({PICTURE})(args[0]) !== args[1]", arg=[panel, before])
    moved = at_rest(panels, panel)
    panels.page.evaluate(REDRAW, panel)
    assert panels.page.evaluate(PICTURE, panel) == moved


def at_rest(panels, panel):
    """The picture of a panel once the kernel has sent, and the page has drawn, all that a change brings about."""
    pictures = [""]

    def stays():
        panels.kernel("1")  # answered after all that the kernel had sent before
        panels.page.wait_for_timeout(1000)
        pictures.append(panels.page.evaluate(PICTURE, panel))
        assert pictures[-1] == pictures[-2]

    eventually(panels.page, stays)
    return pictures[-1]


PICTURE = """panel => [...document.querySelectorAll(`.${panel} .js-plotly-plot`)].filter(plot => plot.clientWidth)
    .flatMap(plot => [...plot.querySelectorAll('.main-svg')].map(svg => svg.innerHTML)).join('')"""
REDRAW = """async panel => {
    const plot = [...document.querySelectorAll(`.${panel} .js-plotly-plot`)].find(plot => plot.clientWidth);
    const layout = { ...structuredClone(plot.layout), datarevision: 'new' };
    await (await window.shardscopePlotly).react(plot, structuredClone(plot.data), layout);
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_axe_finds_no_serious_violation(panels, theme):
    panels.use_theme(theme)

    def has_none():
        assert violations(panels.page) == []

    eventually(panels.page, has_none)


@pytest.mark.parametrize("width", [1400, 900, 600])
def test_nothing_is_wider_than_its_panel(panels, width):
    panels.page.set_viewport_size({"width": width, "height": 9000})
    scrolling = "none" if width >= 900 else ".ss-plan-scroll"
    for _ in range(20):  # figures follow the width, on a busy machine after some seconds
        panels.page.wait_for_timeout(1500)
        found = [*panels.page.evaluate(TOO_WIDE), *panels.page.evaluate(CUT_OFF, scrolling)]
        if not found:
            break
    assert found == []


def test_columns_are_as_wide_as_before_once_a_narrow_window_is_wide_again(panels):
    def columns(width, expected=None):
        panels.page.set_viewport_size({"width": width, "height": 9000})
        panels.page.wait_for_timeout(3000)

        def are_as_expected():
            assert expected in (None, panels.page.evaluate(COLUMNS))

        eventually(panels.page, are_as_expected)
        return panels.page.evaluate(COLUMNS)

    before = columns(1400)
    assert columns(600) != before
    columns(1400, before)


COLUMNS = "() => [...document.querySelectorAll('.ss-left')].map(node => node.clientWidth)"
TOO_WIDE = f"""() => [...document.querySelectorAll('{PANELS}')].flatMap(panel => {{
    const edge = panel.getBoundingClientRect().right + 1;
    return [...panel.querySelectorAll('button, select, input, h2, h3, .ss-words, .ss-status, .js-plotly-plot')]
        .filter(el => el.getBoundingClientRect().right > edge && !el.closest('.ss-plan-scroll, .ss-trials, .lm-TabBar'))
        .map(el => panel.className + ': ' + el.className + ' ' + el.textContent.slice(0, 40));
}})"""
CUT_OFF = f"""scrolling => {{
    const places = '{PANELS}, .jp-OutputArea-output .js-plotly-plot, .jp-OutputArea-output table';
    const nodes = [...document.querySelectorAll(places)].flatMap(place => [place, ...place.querySelectorAll('*')]);
    const told = node => node.className + ' ' + node.textContent.trim().slice(0, 60);
    const wide = nodes.filter(node => node.checkVisibility() && node.clientWidth > 0
        && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== 'inline'
        && !node.closest(`${{scrolling}}, select, .js-plotly-plot, .slider-container`)
        && !node.querySelector('.slider-container'));
    const cut = nodes.filter(node => node.matches('.js-plotly-plot .main-svg text') && node.textContent.trim()
        && node.getBoundingClientRect().width > 0).filter(node => {{
            const plot = node.closest('.js-plotly-plot').getBoundingClientRect();
            const {{ left, right }} = node.getBoundingClientRect();
            return left < plot.left - 2 || right > plot.right + 2;
        }});
    return [...wide.map(told), ...cut.map(told)];
}}"""
"""What is cut off or scrolls: wider than the box it is in, unless in `scrolling`, or beside its figure."""


@pytest.mark.parametrize("ground", ["#ffffff", "#383838"])
def test_text_can_be_read_on_a_page_without_jupyterlabs_colours(panels, ground):
    panels.page.evaluate(BARE, [ground, COLOURS])
    panels.page.wait_for_function("() => document.querySelector('.ss-lab.ss-bare')")

    def has_contrast():
        assert violations(panels.page, "color-contrast") == []

    eventually(panels.page, has_contrast)
