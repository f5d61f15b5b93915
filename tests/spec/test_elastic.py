"""Elastic jobs: the numbers of ranks that they accept, and what a job is on each of them."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from conformance.runs import small_job


def test_a_range_is_given_as_for_torchrun() -> None:
    job = small_job(elastic="2:4", batch=48)
    assert job.elastic == ss.Elastic(least=2, most=4)
    assert small_job(elastic=(2, 4), batch=48) == job
    assert ss.Job.from_json(job.to_json()) == job
    assert str(ss.Job(model="mlp", data="digits").elastic) == "None"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"elastic": "many"}, "elastic='many' is not a range of ranks; give least and most, such as '2:8'"),
        ({"elastic": 5}, "elastic=5 is not a range of ranks"),
        ({"elastic": ss.Elastic(least=2, most=4, spares=1), "batch": 48}, "elastic.spares=1 has no effect without rec"),
        ({"elastic": "4:2"}, "elastic.least=4 is more than elastic.most=2"),
        ({"elastic": "3:4"}, "world_size=2 is outside elastic='3:4'; start with 3 to 4 ranks"),
        ({"elastic": "2:2"}, "elastic='2:2' has no effect: least and most are both 2"),
        ({"elastic": "2:3", "batch": 64, "strategy": "gossip"}, "has no effect: .*64 is not divisible by world_size=3"),
        ({"elastic": "1:2", "strategy": "single", "world_size": 1}, "strategy='single' runs on 1 rank"),
        ({"elastic": "2:4", "batch": 48, "record": ss.Record(noise_scale=True)}, "compares batches whose sizes"),
    ],
)  # fmt: skip
def test_ranges_without_effect_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ss.SpecError, match=says):
        small_job(**fields)


def test_the_global_batch_is_kept_and_micro_batches_divide_the_shares() -> None:
    job = small_job(elastic="2:6", batch=ss.Batch(48, micro_batch=12))
    of = {size: job.at_size(size) for size in (2, 3, 4, 6)}
    assert {each.batch.global_batch for each in of.values()} == {48}
    assert {each.optimizer.lr for each in of.values()} == {job.optimizer.lr}
    assert [of[size].batch.micro_batch for size in of] == [12, 8, 12, 8]
    assert of[3].at_size(2).batch.global_batch == 48
    with pytest.raises(ss.SpecError, match="not divisible by world_size=5.*can train on 2, 3, 4, 6 ranks"):
        job.at_size(5)  # there are only four micro-batches


def test_a_batch_that_cannot_be_divided_evenly_has_shares_that_differ_by_a_micro_batch() -> None:
    assert small_job(elastic="2:4", batch=64).at_size(3).batch.samples(3) == (22, 21, 21)
    batch = ss.Batch(64, micro_batch=4)
    assert small_job(elastic="2:4", batch=batch).at_size(3).batch.samples(3) == (24, 20, 20)
    for strategy, small in (("gossip", batch), ("zero-3", batch), ("ring", ss.Batch(64, micro_batch=32))):
        job = small_job(elastic="2:4", batch=small, strategy=strategy)
        with pytest.raises(
            ss.SpecError, match="64 is not divisible by world_size=3.*can train on 2, 4 ranks"
        ):
            job.at_size(3)


def test_a_scaled_batch_takes_the_learning_rate_along_by_the_rule_of_the_optimizer() -> None:
    range_ = ss.Elastic(least=2, most=8, batch="scaled")
    for optimizer, growth in (("sgd", 4.0), ("lamb", 2.0)):
        job = small_job(elastic=range_, batch=32, optimizer=ss.Optimizer(optimizer, lr=0.1))
        assert job.at_size(8).batch.global_batch == 128
        assert job.at_size(8).optimizer.lr == pytest.approx(0.1 * growth)
        assert job.at_size(3).batch.per_rank(3) == 16
        assert job.at_size(2) == job


def test_workers_of_a_dedicated_server_share_the_batch() -> None:
    server = ss.ParameterServer(dedicated=True)
    job = small_job(elastic="2:4", batch=48, strategy=server)
    assert [job.at_size(size).num_data_ranks for size in (2, 3, 4)] == [1, 2, 3]


def test_a_pipeline_has_as_many_micro_batches_as_its_schedule_needs_for_more_stages() -> None:
    job = small_job(elastic="2:4", batch=48, strategy="pipeline:1f1b")
    assert job.at_size(4).num_micro_batches % 4 == 0 or job.at_size(4).num_micro_batches >= 4
    with pytest.raises(ss.SpecError, match="split=.*adds up|has 2 numbers"):
        small_job(elastic="2:3", batch=48, strategy=ss.Pipeline(split=(2, 2))).at_size(3)


def test_a_job_of_a_fixed_size_says_what_to_set() -> None:
    with pytest.raises(
        ss.SpecError,
        match="start the job with elastic=",
    ):
        small_job().at_size(4)
