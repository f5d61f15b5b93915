"""The load of experts as a figure, and in the Training Lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.spec.mixture import RoutedMixture
from shardscope_widgets.figures._expert_load import (
    draw_expert_load,
    expert_load_info,
    expert_load_text,
)
from shardscope_widgets.trace import Trace
from shardscope_widgets.training_lab.panels import Panels
from training.test_expert_watch import log_of


def trace_of(*, drops: bool = True) -> Trace:
    trace = Trace(run_id="run", label="moe", strategy="ring", world_size=1)
    steps = {1: [[8, 0, 0, 0], [2, 2, 2, 2]], 2: [[2, 4, 1, 1], [2, 2, 2, 2]]}
    trace.feed(
        {"event": "experts", "rank": 0, "t": 1.0, "step": step, "layers": ["blocks.0.ffn", "blocks.1.ffn"],
         "sequences": 1, "balances": [1.0, 1.0], "assigned": loads, "dropped": [[drops, 0, 0, 0], [0, 0, 0, 0]]}
        for step, loads in steps.items()
    )  # fmt: skip
    return trace


def test_the_figure_says_who_gets_how_much_and_how_that_has_changed() -> None:
    info = expert_load_info(trace_of())
    assert info is not None
    assert info.loads == ((1.0, 2.0, 0.5, 0.5), (1.0,) * 4)
    assert info.imbalance == (2.5, 1.5)
    assert info.dropped == (1 / 16, 1 / 16)
    text = expert_load_text(info)
    assert "the busiest expert (1 of blocks.0.ffn) gets 2.00 times an even load" in text
    assert "6.2% of the routed tokens are dropped" in text
    assert "fell from 2.50 to 1.50" in text
    cells, imbalance, dropped = draw_expert_load(info).data
    assert [list(row) for row in cells.z] == [[0, 1, -1, -1], [0, 0, 0, 0]]
    assert (list(imbalance.y), list(dropped.y)) == ([2.5, 1.5], [1 / 16, 1 / 16])


def test_without_drops_there_is_no_line_of_them() -> None:
    info = expert_load_info(trace_of(drops=False))
    assert info is not None
    assert len(draw_expert_load(info).data) == 2
    assert "dropped" not in expert_load_text(info)


@pytest.mark.slow
def test_a_skewed_router_and_how_the_balance_loss_evens_it_out_are_seen(tmp_path: Path) -> None:
    texts = {}
    for balance in (0.0, RoutedMixture.model_fields["balance"].default):
        folder, fields = tmp_path / str(balance), {"balance": balance, "active": 1}
        log_of(folder, steps=60, fields=fields, optimizer=ss.Optimizer("adamw", lr=1e-3))
        trace = Trace(run_id="run", label="moe", strategy="single", world_size=1)
        trace.feed(map(json.loads, (folder / "rank-0.jsonl").read_text().splitlines()))
        info = expert_load_info(trace)
        assert info is not None
        texts[balance], last = expert_load_text(info), info.imbalance[-1]
        assert f"{info.imbalance[0]:.2f} to {last:.2f}" in texts[balance]
    skewed, evened = texts.values()
    assert "rose from" in skewed
    assert "fell from" in evened


@pytest.mark.parametrize(("model", "shown"), [("moe-nano", None), ("gpt-nano", "none")])
def test_the_lab_draws_it_for_a_model_with_experts_only(model: str, shown: str | None) -> None:
    run = ss.launch(ss.Job(model=model, data="python-source", steps=2, batch=4, strategy="single"))
    run.wait(60)
    trace, panels = Trace.read(run), Panels()
    panels.draw(trace, [trace])
    assert panels.experts.box.layout.display == shown
    assert ("times an even load" in panels.experts.words.value) == (model == "moe-nano")
