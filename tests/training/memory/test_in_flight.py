"""Activations of pipelines: what is in flight on a stage, and gradients that counting leaves as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.memory import Activations, Storages

MICRO_BATCHES = 8
ROWS = 4
WIDTH = 16
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


def pipeline(kind: str) -> Callable[[RankContext], tuple[bool, int, int]]:
    """Whether a counted step leaves the gradients of a plain one, the peak, and what is left of it, on one rank."""

    def run(context: RankContext) -> tuple[bool, int, int]:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        own_stages = 1 if kind in ("GPipe", "1F1B") else 2
        num_stages = own_stages * context.world_size
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_stages)]
        mine = [context.rank, num_stages - 1 - context.rank]  # a V, or else a loop
        if kind not in ("ZBVZeroBubble", "DualPipeV"):
            mine = [context.rank + context.world_size * i for i in range(own_stages)]
        cpu = torch.device("cpu")
        stages = [PipelineStage(layers[i], i, num_stages, cpu, group=context.group) for i in mine]
        schedule = get_schedule_class(kind)(
            stages[0] if own_stages == 1 else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss
        )
        rows = torch.rand(2, MICRO_BATCHES * ROWS, WIDTH)
        inputs = [rows[0]] if 0 in mine else []
        targets = {"target": rows[1]} if num_stages - 1 in mine else {}
        known = Storages()
        known.add("inputs", [rows])
        activations = Activations(known)
        gradients = []
        for counted in (False, True):
            parameters = [parameter for i in mine for parameter in layers[i].parameters()]
            for parameter in parameters:
                parameter.grad = None
            with activations.active() if counted else nullcontext():
                schedule.step(*inputs, **targets)
            gradients.append([parameter.grad for parameter in parameters])
        same = all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
        return same, activations.peak, activations.bytes

    return run


@pytest.mark.parametrize("kind", SCHEDULES)
def test_counting_leaves_every_schedule_as_it_is(two: RankPool, tmp_path: Path, kind: str) -> None:
    for same, peak, left in two.run(pipeline(kind), tmp_path):
        assert same
        assert peak > 0
        assert left == 0


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_has_in_flight(
    two: RankPool, tmp_path: Path
) -> None:
    """GPipe all of them; 1F1B as many as there are stages from this one to the last."""
    peaks = {kind: [peak for _, peak, _ in two.run(pipeline(kind), tmp_path)] for kind in ("GPipe", "1F1B")}
    one = 4 * ROWS * WIDTH  # what GELU saves, on the first stage, whose inputs are held anyway
    assert peaks["GPipe"][0] == MICRO_BATCHES * one
    assert peaks["1F1B"][0] == 2 * one
    assert peaks["GPipe"][1] == MICRO_BATCHES * peaks["1F1B"][1]
