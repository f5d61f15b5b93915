"""Values and captions of figures by the arguments that draw them."""

from __future__ import annotations

import inspect
import sys

import pytest

import shardscope as ss
from shardscope_widgets import figures
from shardscope_widgets.figures import _goodput, _halves, _target_cost

FAILING = {"mtbf_s": 3600.0, "save_s": 5.0, "restart_s": 60.0}
TARGET = {"min_steps": 100.0, "critical_batch": 64.0, "batches": [32, 64]}
DRAWN = [
    getattr(figures, name)
    for name in figures.__all__
    if inspect.signature(getattr(figures, name)).return_annotation == "go.Figure"
]


def test_few_names_are_public() -> None:
    assert len(DRAWN) > 40
    assert len(figures.__all__) <= 60


def test_values_and_caption_are_those_of_the_module() -> None:
    values = _goodput.goodput_info(**FAILING)
    assert figures.info(figures.goodput, **FAILING) == values
    assert figures.caption(figures.goodput, **FAILING) == _goodput.goodput_text(values)
    assert figures.info(figures.target_cost, **TARGET) == _target_cost.target_cost_info(**TARGET)


@pytest.mark.parametrize("figure", DRAWN, ids=lambda figure: figure.__name__)
def test_a_sentence_in_the_module_of_a_figure_is_its_caption(figure) -> None:
    module = sys.modules[figure.__module__]
    if hasattr(module, f"{figure.__name__}_text"):
        assert _halves._half(figure, "text")
        assert _halves._half(figure, "info")


def test_a_figure_without_a_caption_is_refused_by_its_name() -> None:
    with pytest.raises(
        ss.SpecError, match=r"figures\.step_times has no caption; draw it: figures\.step_times"
    ):
        figures.caption(figures.step_times, [])
    with pytest.raises(ss.SpecError, match=r"figures\.step_times has no values of its own"):
        figures.info(figures.step_times, [])
