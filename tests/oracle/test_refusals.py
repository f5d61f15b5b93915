"""Every class of refusal: the sentence, and that one process or the ring could not have trained the job as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from oracle import grid, plain
from shardscope.methods.strategies.single import Single

PLAN = plain.Plan(steps=4, batch=24, settings={"lr": 0.05})
NEEDS_A_GRADIENT = ("all-reduce", "ring", "tree", "hierarchical", "zero-1")


def case(model: str, strategy: Any, *, world_size: int = 2, **changes: Any) -> grid.Case:
    """Two rows a micro-batch."""
    workers = strategy.num_data_ranks(world_size)
    plan = replace(PLAN, workers=workers, parts=PLAN.batch // workers // 2, **changes)
    return grid.Case(model, strategy, world_size, plan, micro_batch=2)


def refusal(of: grid.Case, folder: Path) -> str:
    ending = grid.hold(of, folder)
    assert not ending.violation, ending
    return ending.name


EXAMPLES: dict[str, list[grid.Case]] = {
    "no gradient": [case("unused", grid.STRATEGIES[kind][0]) for kind in NEEDS_A_GRADIENT],
    "no gradient for a server": [case("unused", ss.ParameterServer())],
    "different layers": [case("branch", ss.Zero2()), case("branch", ss.Zero3(), world_size=3)],
    "sparse gradient": [
        case("sparse", Single(), world_size=1, optimizer="adamw"),
        case("sparse", ss.Ring(), optimizer="lamb"),
    ],
    "cannot be cut": [case("lstm", ss.Pipeline())],
    "too few layers": [case("mlp", ss.Pipeline(schedule="zbv"), world_size=5)],
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "example"),
    [(name, example) for name, examples in EXAMPLES.items() for example in examples],
    ids=[f"{name}: {example.strategy.label}" for name, examples in EXAMPLES.items() for example in examples],
)
def test_the_sentence_says_which_refusal_it_is(name: str, example: grid.Case, tmp_path: Path) -> None:
    assert refusal(example, tmp_path) == f"refused: {name}"


def test_every_class_of_refusal_has_an_example() -> None:
    assert EXAMPLES.keys() == grid.REFUSALS.keys()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", NEEDS_A_GRADIENT)
def test_a_parameter_that_only_the_last_micro_batch_leaves_out_is_refused_in_its_first_step(
    kind: str, tmp_path: Path
) -> None:
    assert refusal(case("branch", grid.STRATEGIES[kind][0], steps=1), tmp_path) == "refused: no gradient"
