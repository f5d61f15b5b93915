"""A panel copies itself as code that opens the same panel."""

from __future__ import annotations

import pytest

import shardscope as ss
import shardscope_widgets
from shardscope_widgets import CommunicationCalculator, MemoryCalculator, PipelineExplorer, Planner
from shardscope_widgets.kit.frame import Frame


def frame_of(panel):
    return next(part for part in panel.children if isinstance(part, Frame))


@pytest.mark.parametrize(
    ("panel", "code"),
    [
        (MemoryCalculator, "MemoryCalculator()"),
        (
            lambda: MemoryCalculator(model="gpt2-xl", data=2),
            "MemoryCalculator(model='gpt2-xl', data=2, tensor=1, pipeline=1, context=1, expert=1)",
        ),
        (lambda: CommunicationCalculator(workers=16), "CommunicationCalculator(workers=16)"),
        (lambda: PipelineExplorer(schedule="zbv"), "PipelineExplorer(schedule='zbv')"),
        (
            lambda: Planner(model="gpt2-xl", nodes=1, fix={"tensor": 2}),
            "Planner(model='gpt2-xl', nodes=1, seq=1024, global_batch=4096, fix={'tensor': 2})",
        ),
    ],
)
def test_the_code_of_a_panel_opens_the_same_panel(panel, code):
    frame = frame_of(panel())
    first, _, last = frame.code.split("\n")
    assert first == f"from shardscope_widgets import {frame.panel}"
    assert last == code
    again = frame_of(eval(last, vars(shardscope_widgets)))
    assert (again.settings, again.code) == (frame.settings, frame.code)


def test_the_code_follows_the_controls():
    panel = PipelineExplorer()
    panel.stages = 6
    assert frame_of(panel).settings == {"stages": 6}


def test_a_model_chosen_later_keeps_its_layout():
    panel = MemoryCalculator()
    panel.model = "llama-3-70b"
    again = eval(frame_of(panel).code.split("\n")[-1], vars(shardscope_widgets))
    assert [getattr(again, name) for name in ("data", "tensor", "pipeline")] == [
        getattr(panel, name) for name in ("data", "tensor", "pipeline")
    ]


def test_a_panel_of_ones_own_objects_cannot_be_copied():
    model = ss.Model.of("gpt2-xl").replace(layers=3)
    assert frame_of(MemoryCalculator(model=model)).panel == ""
    assert frame_of(Planner(model, nodes=1)).panel == ""
