"""The figure of a run's layers: the map of ratios, what is owed, the alarms in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardscope.runlog.layers import Layers, RatioSeries, ResidualSeries, layers_of
from shardscope.spec import Optimizer
from shardscope.tuning.measured import TrialMetrics
from shardscope_widgets import figures
from shardscope_widgets.figures import _layers
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab.panels import Panels
from shardscope_widgets.tuning_lab._words import alarms_html
from widgets.fake_runs import fake_run

LAMB = Optimizer("lamb")
STEPS = (1, 2, 3, 4)
NOTHING = {key: [] for key in ("layer", "ratio", "weight_norm", "update_norm", "bound")}


def event(step, rank=0, ratio=0.5, **fields):
    told = {"layer": ["a.weight", "a.bias"], "ratio": [ratio, None], "weight_norm": [2.0, None],
            "update_norm": [4.0, None], "bound": ["clamp", None], "owed": []}  # fmt: skip
    return {"event": "layers", "t": float(step), "step": step, "rank": rank, "lr": 1e-3, **told, **fields}


def residuals(values, layer="a.weight", kind="residual"):
    return ResidualSeries(layer, kind, STEPS[: len(values)], tuple(values), (1.0,) * len(values))


@pytest.fixture
def layers():
    return layers_of(
        [
            *(event(step, owed=[["residual", "a.weight", 3.0 * step, 4.0]]) for step in STEPS),
            *(
                event(step, rank=1, owed=[["residual", "a.weight", 4.0 * step, 3.0]]) | NOTHING
                for step in STEPS
            ),
        ],
        LAMB,
    )


def test_ranks_come_together(layers: Layers):
    weight, bias = layers.ratios
    assert weight == RatioSeries(
        "a.weight", STEPS, (1e-3,) * 4, (0.5,) * 4, (2.0,) * 4, (4.0,) * 4, ("clamp",) * 4
    )
    assert not bias.is_adapted
    assert layers.residuals[0].norm == (5.0, 10.0, 15.0, 20.0)
    assert layers.residuals[0].relative == (1.0, 2.0, 3.0, 4.0)
    # ranks with weights of their own: means, and held down if any is; a step told twice counts as told last
    own = layers_of([event(1, ratio="nan"), event(1), event(1, rank=1, ratio=0.3, bound=[None, None])], LAMB)
    assert own.ratios[0].ratio == (pytest.approx(0.4),)
    assert own.ratios[0].bound == ("clamp",)
    assert layers_of([{"event": "step"}], LAMB) == Layers(LAMB, (), ())


def test_the_figure_shows_what_there_is(layers: Layers):
    info = _layers.layers_info(layers, label="run")
    assert info.rows[0].bound == ("clamp",) * 4
    assert info.debts[0].last == 4.0
    cells, crosses, debt = _layers.draw_layers(info).data
    assert cells.z[0][0] == pytest.approx(-0.30103)
    assert list(cells.z[1]) == [None] * 4
    assert list(crosses.x) == [0, 1, 2, 3]
    assert list(debt.y) == [1.0, 2.0, 3.0, 4.0]
    assert "limited by clamp" in cells.text[0][0]
    assert "not adapted" in cells.text[1][0]
    assert [bar.type for bar in _layers.draw_layers(info._replace(debts=())).data] == ["heatmap", "scatter"]
    assert [bar.type for bar in _layers.draw_layers(info._replace(rows=())).data] == ["scatter"]
    silent = info._replace(rows=(), debts=(), alarms=())
    assert not silent.is_telling
    assert _layers.layers_text(silent) == "No step has been sampled yet."


def test_the_words_are_those_of_the_figure(layers: Layers):
    text = _layers.layers_text(_layers.layers_info(layers, label="run"))
    first, alarm = text.split("\n")
    assert first == (
        "run: trust ratios at step 4 lie between 0.5 (a.weight) and 0.5 (a.weight); 1 layer without a trust ratio; "
        "crosses mark ratios limited by clamp. The largest residual, that of a.weight, has 4 times the norm of a "
        "step's gradient."
    )
    assert alarm.startswith("Alarm: the trust ratio of a.weight is limited by clamp in 100%")
    healthy = _layers.layers_info(Layers("sgd", (), (residuals([0.1, 0.2]),)))
    assert _layers.layers_text(healthy).endswith("No alarm.")


def test_long_runs_are_thinned_and_keep_their_first_step():
    info = _layers.layers_info(layers_of([event(step) for step in range(1, 1001)], LAMB))
    assert info.steps[0] == 1
    assert len(info.steps) <= _layers.MOST_SAMPLES + 1
    assert _layers._round_steps((1, *range(10, 130, 10))) == [0, 2, 4, 6, 8, 10, 12]
    assert _layers._round_steps((7,)) == [0]


def test_the_alarms_of_a_trial_stand_below_its_figures():
    measured = TrialMetrics(4, 0.1, 0.1, 0.0, 1, 1, 1, (), ("the ratio of <b> is held",))
    assert "<li>The ratio of &lt;b&gt; is held.</li>" in alarms_html(measured)
    assert alarms_html(None) == alarms_html(TrialMetrics(4, 0.1, 0.1, 0.0, 1, 1, 1, ())) == ""


def test_the_lab_has_a_panel_once_a_run_tells():
    panels, trace = Panels(), replace(Trace.of(fake_run()), optimizer=LAMB)
    panels.draw(trace, [trace])
    assert panels.layers.box.layout.display == "none"
    assert trace.feed([event(step) for step in STEPS])
    panels.draw(trace, [trace])
    assert panels.layers.box.layout.display is None
    assert "limited by clamp" in panels.layers.words.value


@pytest.mark.parametrize("num_looks", [4, 121, 122, 130, 131, 500])
def test_a_run_that_ended_in_what_is_no_number_says_so(num_looks: int):
    events = [
        *(event(step, bound=[None, None]) for step in range(1, num_looks)),
        event(num_looks, ratio="nan"),
    ]
    trace = replace(Trace.of(fake_run()), optimizer=LAMB)
    trace.feed(events)
    info = _layers.layers_info_of(trace)
    assert info.steps[-1] == num_looks
    assert any(f"the trust ratio of a.weight is nan at step {num_looks}" in text for text in info.alarms)
    text = _layers.layers_text(info)
    assert f"no trust ratio is known at step {num_looks}." in text
    assert "No alarm." not in text
    assert _layers.draw_layers(info).data
    whole = _layers.layers_info(layers_of(events, LAMB))
    assert (whole.steps[-1], whole.alarms) == (num_looks, info.alarms)


def test_what_is_owed_is_drawn_to_the_last_step():
    events = [event(step, owed=[["residual", "a.weight", 1.0 * step, 1.0]]) for step in range(1, 132)]
    info = _layers.layers_info(layers_of(events, LAMB))
    assert info.debts[0].last == 131.0


def test_a_residual_that_no_alarm_checks_is_grey_and_the_text_says_why() -> None:
    small = ResidualSeries("a.bias", "residual", STEPS, (1.0, 1.5, 1.5, 1.5), (0.05,) * 4)
    brief = residuals([5.0, 6.0, 7.0, 8.0], layer="a.weight")
    info = _layers.layers_info(Layers(LAMB, (), (brief, small)))
    assert [(debt.layer, debt.is_checked) for debt in info.debts] == [("a.bias", False), ("a.weight", True)]
    grey, coloured = _layers.draw_layers(info).data
    assert (grey.name, grey.line.color, grey.showlegend) == ("a.bias", figures.theme.AXIS, False)
    assert (coloured.name, coloured.showlegend) == ("a.weight", True)
    assert "1 layer above the threshold of 10 raises no alarm, because" in _layers.layers_text(info)
    assert "exceeds 10 only at the end" not in _layers.layers_text(info)
    steps = tuple(range(1, 9))
    ends = ResidualSeries("a.weight", "residual", steps, (*(5.0,) * 7, 11.0), (1.0,) * 8)
    text = _layers.layers_text(_layers.layers_info(Layers(LAMB, (), (ends,))))
    assert "a.weight exceeds 10 only at the end, which raises no alarm" in text
