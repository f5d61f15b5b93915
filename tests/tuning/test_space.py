"""Spaces: what can be said, what is refused before anything runs, and the jobs that trials become."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.spec.space import Space
from shardscope.tuning.apply import apply, check

JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=100)
SPACE: dict[str, Any] = {
    "optimizer": ["adamw", "lamb", "lars"],
    "optimizer[adamw].lr": (1e-4, 1e-2, "log"),
    "optimizer.weight_decay": (0.0, 0.1),
    "optimizer[lars].trust_coefficient": (1e-4, 1e-2, "log"),
    "batch": ss.PowersOfTwo(32, 256),
    "compression": ["none", "topk"],
    "compression[topk].ratio": (0.001, 0.1, "log"),
    "warmup": (0.0, 0.3),
}


def test_a_space_goes_to_json_and_back() -> None:
    space = Space(parameters=SPACE)
    check(JOB, space)
    assert Space.from_json(space.to_json()) == space


def test_only_the_settings_of_the_chosen_branch_are_drawn() -> None:
    space = Space(parameters=SPACE)
    names = list(space.active({"optimizer": "lars", "compression": "none"}, {}))
    assert names == [
        "optimizer", "batch", "compression", "warmup", "optimizer.weight_decay", "optimizer[lars].trust_coefficient",
    ]  # fmt: skip


def test_a_trial_of_another_batch_keeps_its_samples_and_its_share_of_warm_up() -> None:
    job = apply(JOB, {"batch": 256, "warmup": 0.3, "optimizer": "lamb", "lr_rule": "sqrt"})
    assert (job.batch.global_batch, job.steps, job.lr_schedule.warmup_steps) == (256, 25, 8)
    assert job.optimizer.lr == pytest.approx(2e-3 * 2)
    assert apply(JOB, {"batch": 256}, equal="steps").steps == 100
    warm = JOB.replace(compression=ss.Compression("powersgd", warmup_steps=40))
    assert apply(warm, {"batch": 256}).compression.warmup_steps == 10
    assert apply(warm, {"batch": 256}, equal="steps").compression.warmup_steps == 40
    onebit = JOB.replace(optimizer="adamw", compression=ss.Compression("onebit-adam", warmup_steps=10))
    assert apply(onebit, {"batch": 256}).compression.warmup_steps == 5, "the least that it can do with"


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "at least 1 item"),
        ({"optimizers": ["adamw"]}, "did you mean 'optimizer'"),
        ({"optimizer": ["adamx"]}, "did you mean 'adamw'"),
        ({"optimizer": ["adamw", "adamw"]}, "contain a choice twice"),
        ({"optimizer": ("adamw", "lamb")}, "is not a range"),
        ({"optimizer.lr": (1, 0)}, "with low < high"),
        ({"optimizer.lr": (0.0, 1.0, "log")}, "is not valid with log=True"),
        ({"optimizer.lr": "0.1"}, "is not a range"),
        ({"optimizer.lr": (-1.0, 1.0)}, "optimizer.lr"),
        ({"batch": ss.PowersOfTwo(1, 4)}, "batch.global_batch=1 is not divisible by world_size=2; use 2"),
        ({"compression[topk].ratio": (0.1, 0.5)}, "add 'compression' to the space"),
        ({"compression": ["none"], "compression[topk].ratio": (0.1, 0.5)}, "is never used"),
        ({"optimizer": ["lamb"], "optimizer[lamb].momentum": (0.1, 0.9)}, "lamb setting='momentum'"),
        ({"compression": ["topk"], "compression[topk].ratio": (0.1, 2.0)}, "2.0 is not possible"),
        ({"precision": ["fp32", "fp7"]}, "did you mean 'fp64'"),
        ({"batch": (32, 128)}, "write (32, 128, 'log2')"),
        ({"batch": (48, 128, "log2")}, "low=48 is not a power of two"),
        ({"batch": (32.5, 128, "log2")}, "32.5 is not a power of two"),
        ({"warmup": (0.0, 2.0)}, "fraction of the steps"),
        ({"lr_rule": ["cubic"]}, "choices from none, linear, sqrt"),
        ({"strategy": ["ring", "rnig"]}, "'rnig' is not possible"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(space: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(JOB, Space(parameters=space))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_power_of_two_says_which_are_near() -> None:
    with pytest.raises(SpecError, match="low=48 is not a power of two; use for example 64"):
        ss.PowersOfTwo(48, 64)


def test_whole_ends_of_a_setting_with_fractions_are_an_interval() -> None:
    space = Space(
        parameters={"warmup": (0, 1), "optimizer.weight_decay": (0, 1), "compression[powersgd].rank": (1, 8)}
    )
    whole = {name: getattr(parameter, "is_whole", None) for name, parameter in space.parameters.items()}
    assert whole == {"warmup": False, "optimizer.weight_decay": False, "compression[powersgd].rank": True}


def test_powers_of_two_can_be_written_as_a_tuple() -> None:
    assert Space({"batch": (32, 128, "log2")}) == Space({"batch": ss.PowersOfTwo(32, 128)})
