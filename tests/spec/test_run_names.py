"""Runs are named, coloured and matched by the settings of their jobs."""

from __future__ import annotations

from typing import Any

from shardscope.spec import Job, Optimizer
from shardscope.spec.run_names import run_looks, run_names, shared_words
from shardscope.spec.settings import differing, one_process_baseline, settings_of, uncompressed_baseline


def job(**changes: Any) -> Job:
    return Job(**{"model": "mlp", "data": "digits", "strategy": "ring", **changes})


def rate(lr: float) -> Optimizer:
    return Optimizer("adamw", lr=lr)


def test_a_run_alone_has_its_own_label_and_equal_runs_are_numbered() -> None:
    assert run_names([job()]) == ["ring-mlp"]
    assert run_names([job(), job()]) == ["ring-mlp", "ring-mlp (2)"]
    named = [job(name=name) for name in ("a", "a", "a (2)")]
    assert run_names(named) == ["a", "a (3)", "a (2)"]


def test_names_have_what_differs_and_leave_out_what_is_off() -> None:
    jobs = [
        job(optimizer=rate(0.1)),
        job(optimizer=rate(0.01)),
        job(optimizer=rate(0.01), compression="int8"),
    ]
    assert run_names(jobs) == ["lr 0.1", "lr 0.01", "lr 0.01 · int8"]
    assert shared_words(jobs) == "mlp on digits, ring, 2 ranks, adamw"
    assert run_names([job(), job(compression="int8")]) == ["uncompressed", "int8"]


def test_with_many_differences_a_name_has_only_those_that_tell_it_apart() -> None:
    jobs = [
        job(seed=1, steps=5),
        job(strategy="single"),
        job(strategy="tree", world_size=4, optimizer=rate(0.5)),
    ]
    assert run_names(jobs) == ["ring", "single", "tree"]


def test_compression_that_differs_is_always_named() -> None:
    ring = [job(batch=32, compression="topk", seed=2), job(batch=16, compression="int8")]
    names = run_names([*ring, job(strategy="tree", world_size=4), job(strategy="single")])
    assert names[:2] == ["ring · batch 32 · topk", "ring · batch 16 · int8"]


def test_a_name_that_the_user_gave_stays_unless_it_is_given_twice() -> None:
    assert run_names([job(name="mine"), job(seed=1)]) == ["mine", "ring-mlp"]
    assert run_names([job(name="mine"), job(name="mine", seed=1)]) == ["mine, seed 0", "mine, seed 1"]
    others = [job(strategy="tree"), job(strategy="tree", world_size=4, steps=9)]
    assert run_names([job(name="mine"), job(name="mine", seed=1), *others])[:2] == [
        "mine, seed 0",
        "mine, seed 1",
    ]


def test_defaults_that_come_with_another_strategy_do_not_count_as_differences() -> None:
    assert differing([settings_of(job()), settings_of(job(strategy="all-reduce"))]) == ("strategy",)


def test_colours_are_those_of_strategies_only_where_strategy_tells_runs_apart() -> None:
    ring, tree = run_looks(["ring", "tree"])
    assert ring.colour != tree.colour
    assert run_looks(["tree", "ring"])[1].colour == ring.colour
    rates = run_looks(["ring"] * 8)
    assert len({look.colour for look in rates}) == 8
    assert len({look.place for look in rates[:6]}) == 6, "they differ without colour too"


def test_a_run_keeps_its_look_when_others_are_added() -> None:
    (first,) = run_looks(["pipeline"])
    shown = [first, *run_looks(["pipeline", "pipeline"], [first, None])[1:]]
    shown = run_looks(["pipeline", "pipeline", "ring"], [*shown, None])
    assert shown[0] == first
    assert len({look.colour for look in shown}) == len({look.place for look in shown}) == 3
    assert len({look.colour for look in run_looks(["pipeline"] * 8, [first, *[None] * 7])}) == 8


def test_the_baseline_has_the_whole_workload_and_of_several_the_closest_is_taken() -> None:
    singles = [
        job(strategy="single", **changes) for changes in ({}, {"batch": 128}, {"optimizer": rate(0.1)})
    ]
    assert one_process_baseline(job(), singles) == 0
    assert one_process_baseline(job(optimizer=rate(0.1)), singles) == 2
    assert one_process_baseline(job(batch=128), singles) == 1
    assert one_process_baseline(job(precision="bf16"), singles) is None
    assert one_process_baseline(job(optimizer="lamb"), singles) is None


def test_a_compressed_run_is_matched_with_its_own_strategy_and_ranks() -> None:
    others = [job(strategy="tree"), job(world_size=4), job(), job(link="10gbe")]
    assert uncompressed_baseline(job(compression="int8"), others) == 2
    assert uncompressed_baseline(job(compression="int8", strategy="gossip"), others) is None
