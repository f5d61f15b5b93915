"""Compression's settings, and which strategies take it."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.spec import Compression, Job, Optimizer
from shardscope.spec.registry import names, require_known
from shardscope.spec.strategy import strategies


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Compression, {"name": "powersgd", "rank": True}, "compression.rank=True is a bool"),
        (Compression, {"name": "terngrad", "clip": True}, "compression.clip=True is a bool"),
        (Optimizer, {"name": "sgd", "lr": True}, "optimizer.lr=True is a bool"),
    ],
)
def test_a_truth_value_is_no_number(make: type, settings: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(**settings)
    with pytest.raises(SpecError, match=message):
        make.from_json(str(settings).replace("'", '"').replace("True", "true"))


def test_what_is_one_stays_one() -> None:
    assert Compression("powersgd", feedback=False).settings == {
        "rank": 4,
        "feedback": False,
        "warmup_steps": 0,
    }
    assert Optimizer("lamb", trust_clip=True).settings["trust_clip"] is True


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
@pytest.mark.parametrize("name", [name for name in names(Compression) if name != "none"])
def test_a_strategy_without_gradients_on_the_wire_names_those_that_take_the_method(
    strategy: str, name: str
) -> None:
    takers = [
        kind
        for kind, spec in strategies().items()
        if require_known(Compression, name).carriage in spec.carries
    ]
    with pytest.raises(SpecError) as refused:
        Job(model="mlp", data="digits", strategy=strategy, compression=name)
    assert str(refused.value) == (
        f"compression={name!r} cannot be combined with strategy={strategy!r}; this strategy exchanges no gradients; "
        f"use compression='none', or one of the strategies {', '.join(takers)}"
    )
    assert takers


def test_a_strategy_that_adds_up_on_the_way_names_what_it_takes() -> None:
    with pytest.raises(
        SpecError,
        match="use one of bf16, fp16, randomblock, randomk, or for int8 one of the strategies .*, ring, ",
    ):
        Job(model="mlp", data="digits", strategy="tree", compression="int8")
