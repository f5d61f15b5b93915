"""Tables and figures that gain columns, rows and traces while somebody looks at them."""

from __future__ import annotations

import itertools

import pytest

from browser.bare_page import bare_page
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._trial_curves import TrialCurve, TrialCurvesInfo, trial_curves_spec
from shardscope_widgets.figures._trials import TrialInfo
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.planner._screen import PlanTable
from shardscope_widgets.tuning_lab._parts import SpacePicker, TrialTable
from shardscope_widgets.tuning_lab._table import table_info

OBJECTIVES = ("loss",)


@pytest.fixture(scope="module")
def opened(browser_context):
    with bare_page(browser_context) as page:
        yield page


@pytest.fixture
def page(opened):
    yield opened
    assert opened.errors == []


def trial(number, **params):
    shown = tuple((name.replace("__", "."), value) for name, value in params.items())
    return TrialInfo(number, "complete", shown, {"loss": 3.0 - number / 10}, (), 10, 10)


def told(*trials, chosen=-1):
    info = table_info(trials, OBJECTIVES)
    return {
        "header": list(info.header),
        "texts": list(info.texts),
        "rows": list(info.rows),
        "chosen": chosen,
    }


BEFORE = [trial(0, lr=0.1), trial(1, lr=0.2), trial(2, lr=0.3)]
GROWN = {
    "at the end": [*BEFORE, trial(3, lr=0.4, rank=4)],
    "in the middle": [trial(0, lr=0.1, ratio=0.01, trust=1e-3), *BEFORE[1:]],
    "two at once": [*BEFORE, trial(3, lr=0.4, rank=4), trial(4, lr=0.4, ratio=0.5)],
    "of text": [*BEFORE, trial(3, lr=0.4, compression="topk")],
    "and loses one": [trial(0, rank=2), trial(1, rank=4)],
    "and is of another study": [trial(0, batch=32, warmup=0.1)],
}


@pytest.fixture
def table(page):
    page.show(TrialTable._esm, told(*BEFORE) | {"query": ""})
    return page


def as_told(trials, way=-1):
    info = table_info(trials, OBJECTIVES)
    rows = sorted(info.rows, key=lambda row: row["number"] * way)
    return [list(info.header), *(row["cells"] for row in rows)]


@pytest.mark.parametrize("grown", GROWN.values(), ids=GROWN)
def test_a_table_that_gains_a_column_shows_every_cell_under_its_heading(table, grown):
    for names in itertools.permutations(("header", "texts", "rows")):  # the kernel's order is a set's
        state = told(*grown)
        table.update({name: state[name] for name in names})
        assert table.table() == as_told(grown)
        table.update(told(*BEFORE))
        assert table.table() == as_told(BEFORE)


@pytest.mark.parametrize("grown", GROWN.values(), ids=GROWN)
def test_a_click_chooses_the_trial_of_its_row_after_the_table_has_grown(table, grown):
    state = told(*grown, chosen=0)
    table.update({"rows": state["rows"]}, state)
    for row in grown:
        table.page.locator(f"tr[data-number='{row.number}']").click()
        assert table.sent("chosen") == row.number
        table.update({"chosen": row.number})
        shown = table.page.locator("tr[aria-selected='true']")
        assert shown.count() == 1
        assert shown.locator("td").first.inner_text() == str(row.number)


def test_a_table_stays_sorted_by_the_same_column_when_others_come_before_it(table):
    table.page.get_by_role("button", name="lr", exact=True).click()
    grown = [trial(0, batch=8, lr=0.9), trial(1, batch=8, lr=0.2), trial(2, batch=8, lr=0.3)]
    table.update(told(*grown))
    assert [row[0] for row in table.table()[1:]] == ["1", "2", "0"]
    assert table.page.locator("th[aria-sort='ascending']").inner_text().startswith("lr")


def test_a_filter_finds_the_column_that_has_just_appeared(table):
    table.update({"query": "rank>2"})
    assert len(table.table()) == 1
    table.update(told(*BEFORE, trial(3, lr=0.1, rank=4), trial(4, lr=0.1, rank=1)))
    assert [row[0] for row in table.table()[1:]] == ["3"]


def test_the_keyboard_stays_on_its_row_and_its_heading_while_columns_appear(table):
    for place in ("tr[data-number='1']", "th:nth-child(2) button"):
        table.page.locator(place).focus()
        table.update(told(*GROWN["in the middle"]), told(*BEFORE))
        assert table.page.evaluate("(place) => document.activeElement.matches(place)", place)


def test_an_error_while_drawing_leaves_no_trait_behind_and_the_next_update_is_drawn(table):
    grown = told(*GROWN["at the end"])
    table.update({"rows": [{"number": 0}], "header": grown["header"], "texts": grown["texts"]})
    assert table.page.evaluate("model.get('header')") == grown["header"]
    assert "undefined" in table.errors.pop()
    table.update(grown)
    assert table.table() == as_told(GROWN["at the end"])


def test_the_plans_get_new_headings_with_their_new_rows(page):
    page.show(PlanTable._esm, {"header": ["rank", "time"], "rows": [["1", "2 s"]], "chosen": 1})
    page.update({"header": ["rank", "mfu", "time"]}, {"rows": [["1", "60%", "2 s"], ["2", "50%", "3 s"]]})
    assert page.table() == [["rank", "mfu", "time"], ["1", "60%", "2 s"], ["2", "50%", "3 s"]]
    page.update({"header": ["rank", "MFU", "time"]})
    assert page.table()[0] == ["rank", "MFU", "time"]


def test_the_settings_of_another_study_replace_those_before(page):
    def rows(*names):
        return [
            {"name": n, "label": n, "options": ["1", "2"], "kind": "range", "inner": False} for n in names
        ]

    def state(*names):
        return {name: {"on": True, "picked": [0, 1]} for name in names}

    first = {"rows": rows("lr"), "state": state("lr"), "hidden": [], "locked": False, "fixed": False}
    for names in itertools.permutations(("rows", "state", "hidden")):
        page.show(SpacePicker._esm, first)
        change = {"rows": rows("batch", "lr"), "state": state("batch", "lr"), "hidden": ["lr"]}
        page.update({name: change[name] for name in names})
        assert page.page.locator(".ss-space-row:visible").all_inner_texts()[0].startswith("batch")
        assert page.page.locator(".ss-space-row:visible").count() == 1


def curves(*lines):
    kept = [TrialCurve(number, kind, tuple(points)) for number, kind, *points in lines]
    return trial_curves_spec(TrialCurvesInfo("loss", tuple(kept)))


SECOND_STUDY = {
    "the first curve": [curves((0, "running", (0.5, 3.6), (1.0, 3.3)))],
    "a second trial": [
        curves((0, "running", (0.5, 3.6))),
        curves((0, "dominated", (0.5, 3.6)), (1, "running", (0.2, 3.9))),
    ],
    "a logarithmic axis": [curves((0, "dominated", (0.5, 30.0), (1.0, 0.3)))],
    "values far from those before": [curves((0, "dominated", (0.5, 3e4), (1.0, 2e4)))],
    "as many points at other places": [curves((0, "on the front", (0.3, 0.04), (1.0, 0.02)))],
    "a logarithmic axis, then a linear one": [
        curves((0, "dominated", (0.5, 30.0), (1.0, 0.3))),
        curves((0, "dominated", (0.5, 3.1), (1.0, 3.0))),
    ],
}
FIRST_STUDY = curves((0, "on the front", (0.5, 3.5), (1.0, 3.1)))
SHOWN = "() => document.querySelector('.js-plotly-plot')"
RANGE = f"() => [(({SHOWN})()._fullLayout.yaxis.type), ...({SHOWN})()._fullLayout.yaxis.range]"


def has_drawn(page, spec):
    """Wait until the figure shows these values."""
    page.page.wait_for_function(
        f"(y) => JSON.stringify(({SHOWN})()?.data?.map(line => line.y)) === JSON.stringify(y)",
        arg=[line["y"] for line in spec["data"]],
    )


@pytest.mark.parametrize("is_empty_between", [True, False])
@pytest.mark.parametrize("figures", SECOND_STUDY.values(), ids=SECOND_STUDY)
def test_the_axes_of_learning_curves_follow_the_study_that_is_shown(page, figures, is_empty_between):
    blank = theme.blank().to_plotly_json()
    page.show(
        LiveFigure._esm,
        {"figure": {"data": [], "layout": blank["layout"]}, "label": "", "library": ""},
        plotly=True,
    )
    for spec in [FIRST_STUDY, *[curves()] * is_empty_between, *figures]:
        page.update({"figure": spec})
        has_drawn(page, spec)
    values = [value for line in figures[-1]["data"] for value in line["y"] if value is not None]
    kind, low, high = page.page.evaluate(RANGE)
    low, high = (10**low, 10**high) if kind == "log" else (low, high)
    assert low <= min(values) <= max(values) <= high
    if kind == "linear":  # and they fill the plot
        assert max(values) - min(values) > 0.5 * (high - low)
