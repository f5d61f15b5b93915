"""Compressed runs from the outside: their events, their summary, the command line, checks, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.codec import needs_numba
from conformance.runs import all_gone, endless_job, family, rank_pids, small_job
from shardscope import cli
from shardscope.analytic.communication import (
    ShardCollectives,
    fully_sharded_traffic,
    parameter_server_pull_bytes,
    parameter_server_push_bytes,
    ring_all_reduce_bytes,
)
from shardscope.commands._job import build_job
from shardscope.errors import SpecError
from shardscope.runtime import shut_down
from shardscope.runtime.tools.check import both_jobs
from shardscope.runtime.tools.check_report import compare


def test_a_runs_events_and_summary_show_what_compression_saves_and_costs() -> None:
    run = ss.launch(small_job(compression=ss.Compression("int4", feedback=True), steps=12)).wait(60)
    steps, looks = run.events("step"), run.events("compression")
    assert all({row[0] for row in event["spans"]} >= {"codec", "communication"} for event in steps)
    assert all(0 < event["codec_s"] < event["step_time_s"] * 2 for event in steps)
    assert sorted({event["step"] for event in looks}) == [1, 10]
    assert all(event["figures"]["residual_norm"] > 0 for event in looks)
    summary, start = run.summary(), run.events("start")[0]
    shapes = [(start["num_params"],)]
    assert summary.compression == "int4 feedback=True"
    assert summary.uncompressed_bytes_per_step == 2 * 4 * start["num_params"]
    assert summary.bytes_per_step == sum(run.job.compression.bucket_bytes(shapes, 2))
    assert summary.bytes_ratio == pytest.approx(4 / (0.5 + 4 / 256), rel=0.02)
    assert summary.codec_s_per_step is not None
    assert json.loads((run.path / "summary.json").read_text())["compression"] == "int4 feedback=True"


@pytest.mark.slow
@needs_numba
def test_numba_is_loaded_once_for_all_ranks_and_only_where_something_is_compressed(tmp_path: Path) -> None:
    """By the launch server; a rank that finds it loaded before its model is built has it from there."""
    seen = tmp_path / "seen"

    def model() -> Any:
        import sys

        from torch import nn

        with seen.open("a") as file:
            file.write(f"{'numba' in sys.modules} ")
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    shut_down()  # a server that has not compressed anything yet
    for compression in ("none", "int8"):
        ss.launch(small_job(model=model, compression=compression, steps=1), preflight=False).wait(60)
    assert seen.read_text() == "False False True True "


def test_an_uncompressed_summary_says_nothing_of_it() -> None:
    run = ss.launch(small_job(steps=2)).wait(60)
    summary = run.summary()
    assert (summary.compression, summary.uncompressed_bytes_per_step, summary.bytes_ratio) == (None,) * 3
    assert all("codec_s" not in event for event in run.events("step"))


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["fp16-mixed", "fp32"])
@pytest.mark.parametrize("strategy", ["ring", "zero-2"])
def test_an_overflow_in_fp16_is_skipped_and_one_in_fp32_is_named(strategy: str, precision: str) -> None:
    """A gradient scaled up past the range of fp16 is how loss scaling finds its scale."""
    import torch

    def steep(output: Any, target: Any) -> Any:
        return (3e3 if precision == "fp16-mixed" else float("inf")) * torch.nn.functional.cross_entropy(
            output, target
        )

    optimizer = ss.Optimizer("sgd", lr=1e-7, momentum=0.0)
    run = ss.launch(
        small_job(
            strategy=strategy,
            compression="fp16",
            precision=precision,
            loss=steep,
            optimizer=optimizer,
            steps=12,
        )
    )
    if precision == "fp32":
        with pytest.raises(
            ss.RunFailed, match="not finite at step 1, which compression='fp16' cannot represent"
        ):
            run.wait(60)
        return
    skipped = [event["skipped"] for event in run.wait(60).events("step") if event["rank"] == 0]
    assert skipped[0]
    assert not skipped[-1]


def spoilt() -> Any:
    """A model of several buckets; on rank 1 the first of them to be sent holds NaN from its third backward pass on."""
    import torch
    from torch import nn

    class Spoil(torch.autograd.Function):
        passes = 0

        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            Spoil.passes += 1
            return grad * float("nan") if os.environ["RANK"] == "1" and Spoil.passes >= 3 else grad

    class Head(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(inputs, Spoil.apply(self.weight), self.bias)

    body = [nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *body, Head(200, 10))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ring", "all-reduce", "zero-1"])
def test_what_one_rank_alone_refuses_ends_the_run_with_its_words(kind: str) -> None:
    """Its later buckets stay at home: peers, still in the first, would take them for that."""
    job = small_job(strategy={"name": kind, "bucket_mb": 0.05}, compression="int8", model=spoilt)
    said = r"rank 1 .*failed at step \d: NotFinite: the gradient of '\d.weight' is not finite at step \d, which comp"
    started = time.monotonic()
    with pytest.raises(ss.RunFailed, match=said):
        ss.launch(job).wait(60)
    assert time.monotonic() - started < 60


KILLS = [("ring", "int8"), ("zero-2", "int4"), ("parameter-server:async", "int8"), ("gossip", "int4")]


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "compression"), KILLS)
def test_a_killed_rank_of_a_compressed_run_is_named(strategy: str, compression: str) -> None:
    run = ss.launch(endless_job(strategy=strategy, compression=compression, world_size=3, batch=48))
    pids = rank_pids(run)
    processes = family(run)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match=r"rank 1 .*was killed by SIGKILL"):
        run.wait(60)
    assert all_gone(processes)


# What it is held against.


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_the_totals_are_those_of_the_forms_that_count_each_rank(world: int) -> None:
    elements, shapes = 12 * 35, [(12, 35)]  # rows that all these numbers of ranks divide
    size = 4 * elements

    for ring in (ss.Ring(), ss.Zero1()):
        assert ring.exchanged_bytes(size, world) == sum(ring_all_reduce_bytes(elements, 4, world))
    for stage in (2, 3):
        spec = {2: ss.Zero2, 3: ss.Zero3}[stage]
        for replicas in [r for r in (1, 2) if world % r == 0 and world > r]:
            for m in (1, 3):
                strategy = spec(replicas=replicas)
                exact = fully_sharded_traffic(
                    [shapes], world, ShardCollectives(4), gathers=strategy.gathers(2 * m), replicas=replicas,
                    micro_batches=m,
                )  # fmt: skip
                moved = sum(sum(sent.bytes) for name, sent in exact.items() if name != "agreement")
                assert strategy.exchanged_bytes(size, world, micro_batches=m) == moved
    for dedicated in (False, True):
        both_ways = [
            sum(count([size // 2, size // 2][: 1 if world == 2 else 2], world, dedicated=dedicated))
            for count in (parameter_server_push_bytes, parameter_server_pull_bytes)
        ]
        servers = 1 if world == 2 else 2
        strategy = ss.ParameterServer(servers=servers, dedicated=dedicated)
        assert strategy.exchanged_bytes(size // 2 * servers, world) == sum(both_ways)
    assert ss.Pipeline().exchanged_bytes(size, world) is None


# The command line.


def test_options_make_a_compression_and_change_that_of_a_file(tmp_path: Any) -> None:
    def job(*options: str) -> ss.Job:
        return build_job(cli.build_parser().parse_args(["run", "--model", "mlp", *options]))

    first = job(
        "--compression", "topk", "--compression-set", "ratio=0.05", "--compression-set", "feedback=false"
    )
    assert first.compression == ss.Compression("topk", ratio=0.05, feedback=False)
    path = tmp_path / "job.json"
    path.write_text(first.to_json())
    assert job("--job", str(path), "--compression-set", "selection=exact").compression == ss.Compression(
        "topk", ratio=0.05, feedback=False, selection="exact"
    )
    assert job("--job", str(path), "--compression", "int8").compression == ss.Compression("int8")
    for options, message in [
        (("--compression", "int9"), "did you mean"),
        (
            ("--compression", "int8", "--compression-set", "ratio"),
            "is not NAME=VALUE; write for example ratio=0.01",
        ),
        (("--compression", "int8", "--compression-set", "ratio=0.1"), "has no effect on int8"),
        (("--compression-set", "name=int8"), "names the method, not a setting of it; use --compression int8"),
        (("--compression", "powersgd", "--compression-set", "rank=true"), "rank=True is a bool"),
    ]:
        with pytest.raises(SpecError, match=message):
            job(*options)


def test_the_table_of_a_run_shows_ratio_and_codec(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "mlp", "--ranks", "2", "--steps", "4", "--compression", "int8"]
    assert cli.main(["run", *options]) == 0
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert "uncompressed" in header
    assert "ratio" in header
    assert "codec" in header
    assert "3.9x" in row


# Checking against one process.


def test_a_check_says_that_compression_is_why_a_job_differs() -> None:
    job = small_job(compression="int8")
    sharded, alone = both_jobs(job, 3)
    assert sharded.compression.name == "int8"
    assert not alone.compression.is_on
    report = compare(job, ("a", "b"), ({}, {}), ({}, {}))
    assert report.passed is None
    assert "by design: int8 changes the gradients that are exchanged" in report.verdict
    both = compare(small_job(strategy="gossip", compression="int8"), ("a", "b"), ({}, {}), ({}, {}))
    assert "only with its neighbours', and int8 changes" in both.verdict


def test_a_setting_that_the_strategy_would_ignore_is_refused() -> None:
    with pytest.raises(SpecError, match="exchange='gather' has no effect with strategy='zero-3'"):
        small_job(strategy="zero-3", compression=ss.Compression("int8", exchange="gather"))
