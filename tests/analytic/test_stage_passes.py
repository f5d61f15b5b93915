"""The passes of a pipeline's stages, and how often they gather parameters that are freed in between."""

from __future__ import annotations

import pytest

from shardscope.analytic.schedules import build
from shardscope.analytic.schedules.stage_passes import PHASE_OF, pass_flops, stage_passes
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules

SPLIT = [each.name for each in schedules() if each.splits_backward]
MICRO_BATCHES = 8


def gathers(schedule: str) -> list[int]:
    """How often each of the stages on two ranks gathers its parameters."""
    table = build(schedule, 2, MICRO_BATCHES, PipelineSchedule(schedule).default_stages)
    return [sum(each.gathers for each in passes) for passes in stage_passes(table)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_stage_gathers_for_each_forward_and_each_backward_pass(schedule: str) -> None:
    assert set(gathers(schedule)) == {2 * MICRO_BATCHES}


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_parameters_stay_gathered_until_the_gradients_of_weights_that_come_next(schedule: str) -> None:
    assert gathers(schedule) == [2 * MICRO_BATCHES] * 2


@pytest.mark.parametrize("schedule", SPLIT)
def test_only_a_pass_of_another_stage_or_forward_makes_a_stage_gather_a_third_time(schedule: str) -> None:
    table = build(schedule, 2, MICRO_BATCHES, PipelineSchedule(schedule).default_stages)
    expected = [0] * table.num_stages
    for row in table.ranks:
        gathered: int | None = None  # the stage whose parameters are in memory
        for op in (op for op in row if op.stage or op.op != "I"):
            expected[op.stage] += not (op.op == "W" and op.stage and gathered == op.stage)
            gathered = None if op.op == "F" else op.stage
    assert gathers(schedule) == expected
    assert expected[0] == 2 * MICRO_BATCHES
    assert max(expected) <= 3 * MICRO_BATCHES


@pytest.mark.parametrize("schedule", SPLIT)
def test_every_micro_batch_has_its_passes_in_each_pass_through_the_pipeline(schedule: str) -> None:
    table = build(schedule, 2, MICRO_BATCHES, PipelineSchedule(schedule).default_stages)
    once, twice = stage_passes(table), stage_passes(table, 2)
    for stage, (passes, more) in enumerate(zip(once, twice, strict=True)):
        ran = {(PHASE_OF[op.op], op.microbatch) for op in table.ops if op.stage == stage}
        ran -= {("backward", k) for k in range(MICRO_BATCHES) if ("weights", k) in ran and not stage}
        assert {(each.phase, each.micro_batch) for each in passes} == ran
        later = [each._replace(micro_batch=each.micro_batch + MICRO_BATCHES) for each in passes]
        assert more == (*passes, *later)
        assert sum(each.reduces for each in passes) == MICRO_BATCHES


def test_both_passes_of_a_split_backward_pass_recompute_except_on_the_first_stage() -> None:
    assert [pass_flops(op, 1, 1.0) for op in "FBIW"] == [1, 3, 2, 2]
    assert sum(pass_flops(op, 0, 1.0) for op in "IW") == pass_flops("B", 0, 1.0)
    assert sum(pass_flops(op, 1, 0.0) for op in "IW") == pass_flops("B", 1, 0.0)
