"""Model states by formula: against the figures that the ZeRO paper prints, and against plain counting."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.memory import memory_term, model_state_bytes, model_states
from shardscope.spec.layout import searched_schedules

STAGES = [0, 1, 2, 3]


def test_figure_1_of_the_zero_paper() -> None:
    """7.5 billion parameters, 64 ranks, mixed-precision Adam: arXiv 1910.02054, figure 1."""
    held = model_state_bytes(7.5e9, zero_stage=STAGES, data_parallel=64, precision="fp16-mixed")
    assert [round(float(size) / 1e9, 1) for size in held] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    ("params", "ranks", "printed"),
    [
        (7.5e9, 1, (120, 120, 120)),
        (7.5e9, 4, (52.5, 41.3, 30)),
        (7.5e9, 16, (35.6, 21.6, 7.5)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 256, (30.4, 15.4, 0.47)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
    ],
)
def test_table_1_of_the_zero_paper(params: float, ranks: int, printed: tuple[float, ...]) -> None:
    held = model_state_bytes(params, zero_stage=[1, 2, 3], data_parallel=ranks, precision="fp16-mixed") / 1e9
    assert held == pytest.approx(printed, abs=0.051)  # the paper truncates some figures and rounds others


@pytest.mark.parametrize("schedule", searched_schedules())
def test_without_a_pipeline_no_schedule_changes_the_memory(schedule: str) -> None:
    layout = ss.Layout(data=4, tensor=2, micro_batch=2, global_batch=512)
    model = ss.Model.of("llama-3-8b")
    assert memory_term(model, layout.replace(schedule=schedule)).value == memory_term(model, layout).value


def test_arrays_broadcast() -> None:
    held = model_state_bytes(np.array([[1e6], [2e6]]), zero_stage=STAGES, data_parallel=4)
    assert held.shape == (2, 4)
    assert held[1].tolist() == (2 * held[0]).tolist()


@pytest.mark.parametrize(
    ("optimizer", "per_param"), [("sgd", 0), ("nesterov", 4), ("lars", 4), ("adamw", 8), ("lamb", 8)]
)
def test_fp32_states_are_named_term_by_term(optimizer: str, per_param: int) -> None:
    states = model_states(1000, optimizer=optimizer, num_tensors=7)
    counters = 28 if optimizer in ("adamw", "lamb") else 0
    assert (states.parameters, states.gradients, states.optimizer) == (
        4000,
        4000,
        1000 * per_param + counters,
    )
    assert states.total == 8000 + 1000 * per_param + counters


def test_stages_move_one_term_after_another_to_shards() -> None:
    whole, one, two, three = (model_states(1200, zero_stage=stage, data_parallel=4) for stage in STAGES)
    assert whole == (4800, 4800, 9600)
    assert one == (4800, 4800, 2400)
    assert two == (4800, 1200, 2400)
    assert three == (1200, 1200, 2400)


def test_what_there_is_no_formula_for_is_refused() -> None:
    with pytest.raises(ss.SpecError, match="did you mean 'adamw'"):
        model_state_bytes(1, optimizer="adam")
    with pytest.raises(ss.SpecError, match="did you mean 'fp32'"):
        model_state_bytes(1, precision="fp23")
    with pytest.raises(ss.SpecError, match="zero_stage=4 is not a ZeRO stage"):
        model_state_bytes(1, zero_stage=4)


def test_the_formulas_are_found_from_the_top() -> None:
    assert ss.analytic.memory.model_state_bytes(num_params=10, optimizer="sgd") == 80
