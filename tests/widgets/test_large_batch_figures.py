"""The figures of the noise scale and of range tests: their data compared by value, their words, what is drawn."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from shardscope.analytic.large_batch import RateSuggestions
from shardscope.analytic.large_batch.noise_scale import NoiseScale
from shardscope_widgets import figures
from shardscope_widgets.figures import _lr_range, _noise_scale, _target_cost


def measured(critical=(80.0, 100.0), low=(0.0, 70.0), high=(math.inf, 160.0), batch=64):
    steps = tuple(range(1, len(critical) + 1))
    return NoiseScale(batch, 32, 0.99, steps, (1.0,) * len(steps), critical, critical, low, high)


def info_of(**changes):
    return _noise_scale.noise_scale_info(measured(**changes), [1, 2], [2.5, 2.0], label="ring-mlp")


class TestNoiseScale:
    def test_what_has_no_end_has_no_place_on_the_axis(self):
        assert info_of() == _noise_scale.NoiseScaleInfo(
            label="ring-mlp", batch=64, steps=(1, 2), critical=(80.0, 100.0), low=(None, 70.0), high=(None, 160.0),
            loss_steps=(1, 2), loss=(2.5, 2.0), smooth_loss=pytest.approx((2.3, 2.2), abs=1e-3),
        )  # fmt: skip

    def test_the_axis_holds_the_batch_in_use_and_is_not_stretched_by_wide_intervals(self):
        assert info_of(batch=4000).top == pytest.approx(5200)
        assert info_of(batch=4).bottom == pytest.approx(4 / 1.3)
        assert info_of(high=(1e9, 1e12)).top == pytest.approx(100 * 10**1.5)

    @pytest.mark.parametrize(
        ("batch", "words"),
        [
            (16, "well below this: a larger one would save steps"),
            (64, "is close to this"),
            (512, "well above this"),
        ],
    )
    def test_words_say_where_the_batch_in_use_is(self, batch, words):
        text = _noise_scale.noise_scale_text(info_of(batch=batch))
        assert text.startswith(
            "ring-mlp: the critical batch size is about 100 samples (95% confidence interval 70 to 160)"
        )
        assert words in text

    def test_words_for_what_is_not_known(self):
        assert "No step" in _noise_scale.noise_scale_text(
            _noise_scale.noise_scale_info(measured((), (), ()), [], [])
        )
        lost = info_of(critical=(math.inf, math.inf))
        assert "cannot be distinguished from noise yet" in _noise_scale.noise_scale_text(lost)
        assert "no upper limit yet" in _noise_scale.noise_scale_text(info_of(high=(math.inf, math.inf)))

    def test_the_drawing_has_a_band_a_line_and_the_batch_in_use(self):
        figure = _noise_scale.draw_noise_scale(info_of())
        low, high, critical, raw, smooth = figure.data
        assert high.fill == "tonexty"
        assert tuple(low.y)[1:] == (70.0,)
        assert tuple(critical.y) == (80.0, 100.0)
        assert raw.yaxis == smooth.yaxis == "y2"
        (line,) = figure.layout.shapes
        assert line.y0 == line.y1 == 64
        assert _noise_scale.draw_noise_scale(_noise_scale.noise_scale_info(measured((), (), ()), [], [])).data

    def test_a_run_is_all_it_takes(self):
        import pandas as pd

        metrics = pd.DataFrame({"step": [1, 2], "loss": [2.5, None]})
        run = SimpleNamespace(noise_scale=measured, metrics=lambda: metrics, name="ring-mlp")
        assert tuple(figures.noise_scale(run).data[3].y) == (2.5,)


def range_of(exploded=True):
    lr = np.geomspace(1e-4, 1, 9)
    loss = (2.0, 2.0, 1.9, 1.5, 1.0, 1.1, 2.0, 9.0, 70.0)
    rates = RateSuggestions(steepest=float(lr[3]), tenth_of_lowest=float(lr[4] / 10), lowest=float(lr[4]))
    return SimpleNamespace(lr=tuple(lr.tolist()), loss=loss, smooth=loss, rates=rates, exploded=exploded)


class TestLrRange:
    def test_the_axis_shows_the_fall_and_not_the_explosion(self):
        info = _lr_range.lr_range_info(range_of())
        assert (info.bottom, info.top) == (0.75, 2.6)
        assert [(mark.name, mark.lr) for mark in info.marks] == [
            ("steepest fall", pytest.approx(10**-2.5)),
            ("lowest loss", pytest.approx(1e-2)),
            ("a tenth of that rate", pytest.approx(1e-3)),
        ]

    def test_words_say_where_to_begin(self):
        text = _lr_range.lr_range_text(_lr_range.lr_range_info(range_of()))
        assert text == (
            "The smoothed loss falls fastest at a learning rate of 0.0032, a good first choice, and is lowest at 0.01; "
            "a tenth of that, 0.001, is another common choice. It rises above its initial value at 0.32, and diverges "
            "at 1, where the test ended."
        )
        calm = _lr_range.lr_range_text(_lr_range.lr_range_info(range_of(exploded=False)))
        assert "has not diverged at 1, so higher rates may work too" in calm

    def test_the_drawing_has_a_line_for_each_mark(self):
        figure = figures.lr_range(range_of())
        assert figure.layout.xaxis.type == "log"
        assert [line.name for line in figure.data[2:]] == [
            "steepest fall, 0.0032", "lowest loss, 0.01", "a tenth of that rate, 0.001",
        ]  # fmt: skip
        assert tuple(figure.data[2].x) == pytest.approx((10**-2.5, 10**-2.5))


def test_the_cost_of_a_target_marks_the_critical_batch_size_and_the_tested_ones() -> None:
    info = _target_cost.TargetCostInfo(100, 64.0, (32, 64))
    assert info.cost([32, 64]) == ([9600.0, 12800.0], [300.0, 200.0])
    assert "it takes 200 at the critical batch size of 64 samples" in _target_cost.target_cost_text(info)
    curve, tested, critical = figures.target_cost(min_steps=100, critical_batch=64.0, batches=(32, 64)).data
    assert tested.text == ("32", "64")
    assert (tested.x, tested.y) == ((9600.0, 12800.0), (300.0, 200.0))
    assert (critical.text, critical.y) == (("64",), (200.0,))
    assert min(curve.x) < 9600 < max(curve.x)
