"""How a population's settings are drawn and move: by kind, within bounds, and only to jobs that can exist."""

from __future__ import annotations

import json
import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import shardscope as ss
from shardscope.spec.space import Space
from shardscope.tuning.population import Ranges
from shardscope.tuning.population.explore import Conditional

JOB = ss.Job(model="mlp", data="digits", batch=32)
SPACE: dict[str, Any] = {
    "optimizer.lr": (1e-4, 1e-1, "log"),
    "optimizer.weight_decay": (0.0, 0.1),
    "lr_schedule.warmup_steps": (0, 20),
    "batch": (16, 128, "log2"),
    "compression": ["none", ss.Compression("topk", ratio=0.1), "int8"],
}


@examples(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_a_walk_stays_in_the_space_and_every_stop_of_it_is_a_job(seed: int) -> None:
    random, space = Random(seed), Ranges(SPACE, JOB)
    settings = space.draw(JOB, random)
    for _ in range(10):
        assert 1e-4 <= settings["optimizer.lr"] <= 1e-1
        assert 0.0 <= settings["optimizer.weight_decay"] <= 0.1
        assert settings["lr_schedule.warmup_steps"] in range(21)
        assert settings["batch"] in (16, 32, 64, 128)
        assert settings["compression"] in ("none", {"name": "topk", "ratio": 0.1}, "int8")
        assert json.loads(json.dumps(settings)) == settings
        assert space.apply(JOB, settings).batch.global_batch == settings["batch"]
        settings = space.explore(JOB, settings, random, resample=0.25)


def steps_from(space: dict[str, Any], settings: dict[str, Any], count: int = 400) -> Counter[Any]:
    """Where single steps lead, by how often."""
    (path,) = space
    known, random = Ranges(space, JOB), Random(1)
    return Counter(known.explore(JOB, settings, random, resample=0.0)[path] for _ in range(count))


def test_numbers_move_by_a_fifth_and_powers_of_two_to_their_neighbours() -> None:
    rates = steps_from({"optimizer.lr": (1e-4, 1e-1, "log")}, {"optimizer.lr": 1e-2})
    assert sorted(rates) == pytest.approx([8e-3, 1.2e-2])
    assert set(steps_from({"batch": (16, 256, "log2")}, {"batch": 64})) == {32, 128}
    assert set(steps_from({"batch": (16, 256, "log2")}, {"batch": 256})) == {128, 256}
    assert set(steps_from({"lr_schedule.warmup_steps": (0, 50)}, {"lr_schedule.warmup_steps": 30})) == {
        24,
        36,
    }
    assert set(steps_from({"lr_schedule.warmup_steps": (0, 50)}, {"lr_schedule.warmup_steps": 1})) == {0, 2}


def test_from_zero_there_is_a_way_up() -> None:
    space = {"optimizer.weight_decay": (0.0, 0.1)}
    assert max(steps_from(space, {"optimizer.weight_decay": 0.0})) == pytest.approx(0.001)


def test_categories_have_no_neighbours_and_are_only_drawn_anew() -> None:
    space = {"compression": ["none", "int8", "topk"]}
    assert set(steps_from(space, {"compression": "int8"})) == {"int8"}
    drawn = [
        Ranges(space, JOB).explore(JOB, {"compression": "int8"}, Random(seed), resample=1.0)["compression"]
        for seed in range(300)
    ]
    counts = Counter(drawn)
    assert set(counts) == {"none", "int8", "topk"}
    assert all(60 < count < 140 for count in counts.values())


def test_as_many_are_drawn_anew_as_asked() -> None:
    space, random = Ranges({"optimizer.lr": (1e-4, 1e-1, "log")}, JOB), Random(0)
    moved = [
        space.explore(JOB, {"optimizer.lr": 1e-2}, random, resample=0.25)["optimizer.lr"] for _ in range(2000)
    ]
    stepped = sum(math.isclose(value, 8e-3) or math.isclose(value, 1.2e-2) for value in moved)
    assert 0.70 < stepped / len(moved) < 0.80


def test_what_makes_no_job_is_not_drawn() -> None:
    """LARS has no betas; only one of these pairs can exist."""
    job = JOB.replace(optimizer=ss.Optimizer("adamw", betas=(0.9, 0.99)))
    space = Ranges({"optimizer.name": ["lars", "adamw"]}, job)
    assert {space.draw(job, Random(seed))["optimizer.name"] for seed in range(20)} == {"adamw"}
    with pytest.raises(
        ss.SpecError, match="no valid job in 50 draws from the space; the last: optimizer.betas"
    ):
        Ranges({"optimizer.name": ["lars"]}, job).draw(job, Random(0))


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "no setting to explore"),
        ({"optimizer.rate": (0.1, 1.0)}, "optimizer.rate' is not known"),
        ({"model": ["mlp"]}, "setting of the space='model' is not known"),
        ({"optimizer.lr": (1.0, 0.1)}, r"optimizer.lr=\(1.0, 0.1\) is empty; give the smaller bound first"),
        ({"optimizer.lr": (0.0, 0.1, "log")}, "has the lower bound 0.0, which has no logarithm"),
        ({"optimizer.lr": "high"}, "optimizer.lr='high' is not a range; give"),
        ({"optimizer.lr": (0.1, math.nan)}, "is not a range"),
        ({"batch": (10, 64, "log2")}, "10 is not a power of two"),
        ({"compression": []}, "has nothing to choose from"),
    ],
)
def test_a_bad_space_is_refused_in_one_sentence(space: dict[str, Any], words: str) -> None:
    with pytest.raises(ss.SpecError, match=words) as refused:
        Ranges(space, JOB)
    assert "\n" not in str(refused.value)


def test_a_space_of_branches_is_explored_within_its_branches() -> None:
    space = Space(
        parameters={
            "optimizer": ["adamw", "lamb"],
            "optimizer[lamb].lr": (1e-3, 1e-1, "log"),
            "batch": ss.PowersOfTwo(16, 64),
            "compression": ["none", "topk", "powersgd"],
            "compression[powersgd].rank": (1, 16, "log"),
            "compression[topk].ratio": (0.01, 0.5, "log"),
        }
    )
    found = Conditional(space, JOB)
    random, job = Random(0), JOB.replace(steps=20)
    for _ in range(40):
        settings = found.draw(job, random)
        for _ in range(3):
            moved = found.apply(job, settings)
            assert moved.optimizer.name in {"adamw", "lamb"}
            assert moved.batch.global_batch in {16, 32, 64}
            settings = found.explore(job, settings, random, resample=0.25)


@pytest.mark.parametrize("name", ["seed", "world_size", "precision"])
def test_what_no_checkpoint_would_fit_is_refused(name: str) -> None:
    values = {"seed": [1, 2], "world_size": [1, 2], "precision": ["fp32", "bf16-mixed"]}[name]
    with pytest.raises(
        ss.SpecError, match=rf"space\['{name}'\] cannot change while a member trains"
    ) as refused:
        Conditional(Space({name: values}), JOB)
    assert "\n" not in str(refused.value)


def test_a_value_that_no_job_can_have_is_refused_as_a_study_does() -> None:
    with pytest.raises(ss.SpecError, match=r"space\['compression'\]: 'topk' is not possible") as refused:
        Conditional(Space({"compression": ["none", "topk"]}), JOB.replace(strategy="pipeline", world_size=2))
    assert "\n" not in str(refused.value)
    with pytest.raises(ss.SpecError, match="has no effect: compression is 'none'"):
        Conditional(Space({"compression[topk].ratio": (0.1, 0.5)}), JOB)
