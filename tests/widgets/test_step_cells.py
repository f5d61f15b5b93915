"""Cells of the step player: what each rank holds, from the messages and passes of a step alone."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from shardscope_widgets.step_player._cells import MOST_CELLS, cells_of


def step_of(strategy, world_size=4, **settings):
    job = ss.Job(
        model="mlp", data="digits", strategy=strategy, world_size=world_size, batch=4 * world_size, **settings
    )
    return ss.simulate.step_events(job)


def level(cell, at):
    return float(np.interp(at, *zip(*cell.keys, strict=True)))


def levels(step, what, at):
    """How full each rank's cells are at a time, by rank."""
    rows = [[] for _ in range(step.world_size)]
    for cell in cells_of(step):
        if cell.what == what:
            rows[cell.rank].append(round(level(cell, at), 2))
    return rows


def test_a_ring_fills_the_cells_of_a_rank_round_by_round_and_passes_partial_sums_on():
    step = step_of("ring")
    ends = sorted({message.end_s for message in step.messages})
    backward = next(e for e in step.events if e.kind == "backward")
    assert levels(step, "gradients", backward.start_s) == [[0, 0, 0, 0]] * 4
    assert levels(step, "gradients", backward.end_s) == [[0.25] * 4] * 4
    assert levels(step, "gradients", ends[0] - 1e-9)[0] == [0.25, 0.25, 0.5, 0]
    assert levels(step, "gradients", ends[1] - 1e-9)[0] == [0.25, 0.75, 0, 0]
    assert levels(step, "gradients", ends[2] - 1e-9)[0] == [1, 0, 0, 0]
    assert levels(step, "gradients", ends[2] - 1e-9) == np.eye(4).tolist()
    assert levels(step, "gradients", step.step_time_s) == [[1, 1, 1, 1]] * 4


def test_under_zero_3_a_rank_ends_with_its_own_chunk_of_the_sum_and_frees_gathered_parameters():
    step = step_of("zero-3")
    own = np.eye(4).tolist()
    assert levels(step, "gradients", step.step_time_s) == own
    assert levels(step, "parameters", 0.0) == levels(step, "parameters", step.step_time_s) == own
    gathered = max(m.end_s for m in step.messages if m.kind == "ring_all_gather")
    assert levels(step, "parameters", gathered) == [[1, 1, 1, 1]] * 4


@pytest.mark.parametrize("strategy", ["all-reduce", "tree", "hierarchical", "ring"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_all_reduce_ends_with_the_whole_sum_on_every_rank(strategy, world_size):
    step = step_of(strategy, world_size)
    assert {value for row in levels(step, "gradients", step.step_time_s) for value in row} == {1}


def test_gossip_mixes_the_parameters_of_neighbours_only():
    step = step_of("gossip")
    assert levels(step, "parameters", 0.0) == [[0.25]] * 4
    assert levels(step, "parameters", step.step_time_s) == [[0.75]] * 4


def test_a_parameter_server_sums_gradients_and_sends_parameters():
    step = step_of("parameter-server")
    pulled = levels(step, "parameters", step.step_time_s)
    assert levels(step, "gradients", step.step_time_s) == [[1], [0], [0], [0]]
    assert pulled == [[1]] * 4


def test_a_stage_of_a_pipeline_has_one_cell_for_each_micro_batch():
    job = ss.Job(model="gpt-nano", data="python-source", strategy="pipeline", world_size=2, batch=16)
    step = ss.simulate.step_events(job)
    cells = cells_of(step)
    forward = next(e for e in step.events if e.kind == "forward")
    assert {(cell.rank, cell.what, cell.number) for cell in cells} == {
        (rank, "micro-batches", k) for rank in range(2) for k in range(4)
    }
    assert level(cells[0], forward.end_s) == 0.5
    assert {level(cell, step.step_time_s) for cell in cells} == {1}


def test_too_many_cells_are_drawn_as_their_mean():
    step = step_of("ring", 16)
    cells = cells_of(step)
    assert len(cells) == 16
    assert cells[0].parts == 16 > MOST_CELLS
    assert [level(cell, step.step_time_s) for cell in cells] == [1.0] * 16
