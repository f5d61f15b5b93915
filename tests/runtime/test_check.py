"""A job sharded against the same job on one process: real runs, and the report of made-up ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope import cli
from shardscope.runtime.launcher.driver_server import driver as launcher
from shardscope.runtime.tools.check import both_jobs, check, read_parameters
from shardscope.runtime.tools.check_report import compare
from shardscope.spec import Record
from shardscope.spec.strategy import strategies


def report_of(ours, theirs, *, losses=None, **changes):
    losses = losses or ({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0})
    arrays = [{name: np.array(value, float) for name, value in values.items()} for values in (ours, theirs)]
    return compare(small_job(**changes), ("ours", "theirs"), losses, tuple(arrays))


class TestBothJobs:
    def test_one_process_sees_the_same_samples_in_micro_batches_of_a_rank(self):
        sharded, alone = both_jobs(small_job(world_size=4, batch=64), 5)
        assert (sharded.steps, sharded.world_size, sharded.batch.global_batch) == (5, 4, 64)
        assert (alone.steps, alone.world_size, alone.batch.micro_batch) == (5, 1, 16)
        assert sharded.record.parameters
        assert alone.record.parameters

    def test_a_warm_up_longer_than_the_check_is_cut(self):
        job = small_job(steps=50, lr_schedule=ss.LRSchedule("linear", warmup_steps=20))
        assert [each.lr_schedule.warmup_steps for each in both_jobs(job, 5)] == [5, 5]

    def test_one_process_has_nothing_to_be_checked_against(self):
        with pytest.raises(ss.SpecError, match="check a job with another strategy, such as 'ring'"):
            both_jobs(small_job(strategy="single", world_size=1), 5)


class TestReport:
    def test_rounding_passes_and_is_told_in_a_sentence(self):
        report = report_of({"w": [1 + 1e-7]}, {"w": [1.0]})
        assert report.passed
        assert report.verdict == (
            "ring on 2 ranks agrees with one process: after 10 steps all parameters together differ by 1.0e-07, "
            "the losses by at most 0 (bound 1e-05 for fp32)."
        )

    def test_steps_that_were_all_skipped_prove_nothing(self):
        arrays = {"w": np.ones(1)}
        losses = ({1: 2.0}, {1: 2.0})
        job = small_job(precision="fp16-mixed")
        report = compare(job, ("ours", "theirs"), losses, (arrays, arrays), skipped=job.steps)
        assert report.passed is None
        assert "was not tested: the gradients of all 10 steps overflowed in fp16-mixed" in report.verdict
        assert "not tried" in report._repr_html_()
        assert compare(job, ("ours", "theirs"), losses, (arrays, arrays), skipped=job.steps - 1).passed

    def test_the_bound_follows_the_precision(self):
        assert not report_of({"w": [1 + 1e-7]}, {"w": [1.0]}, precision="fp64").passed
        assert report_of({"w": [1 + 1e-2]}, {"w": [1.0]}, precision="bf16-mixed").passed

    def test_the_worst_tensor_comes_first_and_is_named(self):
        report = report_of({"a": [1.0, 0.0], "b": [3.0, 0.0]}, {"a": [1.0, 0.0], "b": [2.0, 0.0]})
        assert list(report.table["tensor"]) == ["b", "a"]
        assert list(report.table["relative_difference"]) == [0.5, 0.0]
        assert list(report.table["share"]) == [1.0, 0.0]
        assert "does not agree" in report.verdict
        assert "most of all b by 5.0e-01" in report.verdict

    def test_a_loss_apart_fails_with_its_step(self):
        report = report_of({"w": [1.0]}, {"w": [1.0]}, losses=({1: 2.0, 2: 1.1}, {1: 2.0, 2: 1.0}))
        assert not report.passed
        assert "the first loss to differ is from step 2" in report.verdict

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_no_number_fails(self, value):
        report = report_of({"w": [value], "v": [1.0]}, {"w": [1.0], "v": [1.0]})
        assert report.passed is False
        assert report.tensors[0].tensor == "w"
        assert json.loads(report.to_json())["difference"] == "inf"

    def test_a_parameter_of_one_run_only_fails_and_is_named(self):
        report = report_of({"w": [1.0], "extra": [1.0]}, {"w": [1.0]})
        assert report.passed is False
        assert "only one of the runs has extra" in report.verdict

    def test_a_step_without_a_loss_in_one_run_fails(self):
        assert report_of({"w": [1.0]}, {"w": [1.0]}, losses=({1: 2.0}, {1: 2.0, 2: 1.0})).passed is False

    @pytest.mark.parametrize(
        ("strategy", "reason"),
        [
            ("gossip", "updates its own parameters"),
            ("parameter-server:async", "applied as they arrive"),
        ],
    )
    def test_what_is_not_equal_by_design_neither_passes_nor_fails_and_says_why(self, strategy, reason):
        report = report_of({"w": [1.5]}, {"w": [1.0]}, strategy=strategy)
        assert report.passed is None
        assert f"{strategy} on 2 ranks is not equal to one process by design: " in report.verdict
        assert reason in report.verdict
        assert "differ by 5.0e-01" in report.verdict

    def test_a_server_that_waits_for_all_workers_must_be_equal(self):
        assert report_of({"w": [1.0]}, {"w": [1.0]}, strategy="parameter-server").passed

    def test_a_result_that_depends_on_the_cut_fails_and_blames_the_loss(self):
        def on_cut(theirs=1.0, **found):
            arrays = ({"w": np.ones(1)}, {"w": np.full(1, theirs)})
            losses = ({1: 2.0}, {1: 2.0})
            return compare(small_job(), ("a", "b", "c"), losses, arrays, cut_difference=0.1, **found)

        assert on_cut().passed is False
        assert "agrees with one process" in on_cut().verdict
        assert "But the result depends on how the batch is split" in on_cut().verdict
        assert "set its attribute count" in on_cut().verdict
        assert on_cut(loss_note="the loss is so").verdict.endswith("the loss is so.")
        norms = on_cut(mixes_samples=("BatchNorm2d",))
        assert norms.passed
        assert "because BatchNorm2d layers mix the samples of a micro-batch" in norms.verdict
        assert on_cut(mixes_samples=("BatchNorm2d",), loss_note="the loss is so").passed is False
        assert (
            "how the batch is split" not in on_cut(theirs=2.0).verdict
        )  # the ranks differ too, as with dropout

    def test_a_whole_batch_that_does_not_fit_is_told(self):
        arrays, losses = {"w": np.ones(1)}, {1: 2.0}
        report = compare(
            small_job(), ("a", "b"), (losses, losses), (arrays, arrays), not_uncut_because="out of memory"
        )
        assert report.passed
        assert report.verdict.endswith("The whole batch in one micro-batch was not compared: out of memory.")

    def test_in_a_notebook_names_are_escaped_and_the_mark_is_not_colour_alone(self):
        html = report_of({"<b>": [1.5]}, {"<b>": [1.0]})._repr_html_()
        assert "&lt;b&gt;" in html
        assert "<b>" not in html
        assert "✗ not equal" in html


def two_layers():
    import torch
    from torch import nn

    class Skewed(nn.Module):
        """Its second branch sees another scale on each rank."""

        def __init__(self):
            super().__init__()
            self.same, self.skewed = nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x):
            x = x.flatten(1)
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            return self.same(x.detach()) * 0 + self.skewed(x * (1 + rank))

    return Skewed()


def with_dropout():
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))


class TestRealRuns:
    def test_the_ring_agrees_and_both_runs_stay_on_disk(self):
        seen = []
        report = check(
            small_job(world_size=3, batch=48), 4, on_step=lambda run, step: seen.append((run.id, step))
        )
        assert report.passed, report.verdict
        assert len(report.losses) == 4
        assert {run_id for run_id, _ in seen} == set(report.runs) == {run.id for run in ss.runs(all=True)}
        sharded = ss.Run.attach(report.runs[0])
        assert set(read_parameters(sharded)) == {row.tensor for row in report.tensors}

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", [kind for kind in strategies() if kind != "single"])
    def test_every_strategy_agrees_or_says_why_not(self, kind):
        job = small_job(strategy=kind, batch=ss.Batch(global_batch=64, micro_batch=8))
        report = check(job, 2)
        assert report.passed is (None if job.strategy.differs_because else True), report.verdict

    def test_a_forward_that_depends_on_the_rank_fails_and_the_tensor_is_named(self):
        report = check(small_job(model=two_layers, optimizer=ss.Optimizer("sgd", lr=0.01)), 3)
        assert report.passed is False
        assert {row.tensor for row in report.tensors[:2]} == {"skewed.bias", "skewed.weight"}
        assert "most of all skewed." in report.verdict
        assert report.tensors[-1].relative_difference == 0

    def test_dropout_draws_differently_on_each_rank_and_is_hinted_at(self):
        report = check(small_job(model=with_dropout), 3)
        assert report.passed is False
        assert "such as dropout" in report.verdict

    def test_dropout_is_not_taken_for_a_loss_that_depends_on_the_cut(self):
        job = small_job(model=with_dropout, strategy="pipeline", batch=ss.Batch(32, micro_batch=8))
        report = check(job, 2)
        assert report.cut_difference is None
        assert "not compared: Dropout layers draw different random numbers" in report.verdict

    def test_a_run_that_fails_says_which_rank(self):
        def broken():
            raise ValueError("no such layer")

        with pytest.raises(ss.RunFailed, match="no such layer"):
            check(small_job(model=broken), 3)

    def test_what_the_callback_raises_ends_the_check_and_its_run(self):
        def enough(_run, _step):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            check(small_job(), 1_000_000, on_step=enough)
        (run,) = ss.runs(all=True)
        assert not run.is_alive

    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.parametrize("of_the_two", [1, 2])
    def test_a_run_that_somebody_stops_ends_the_check_in_a_sentence(self, of_the_two):
        seen = []

        def stop(run, steps):
            seen.append(run) if run not in seen else None
            if len(seen) == of_the_two and steps:
                ss.Run.attach(run.path).stop()

        with pytest.raises(
            ss.RunFailed, match="was stopped before its last step .*asked to stop.* check again"
        ):
            check(small_job(), 500, on_step=stop)

    @pytest.mark.slow
    def test_a_killed_server_is_named(self):
        def kill(run, steps):
            if steps:
                launcher.server().kill()

        with pytest.raises(ss.RunFailed, match="the launch server .* was killed"):
            check(small_job(), 2000, on_step=kill)
        assert check(small_job(), 2).passed

    def test_parameters_are_written_only_where_asked_for(self):
        plain = ss.launch(small_job(steps=2)).wait(60)
        asked = ss.launch(small_job(steps=2, record=Record(parameters=True))).wait(60)
        assert not (plain.path / "parameters.npz").exists()
        assert (asked.path / "parameters.npz").exists()

    def test_the_command_prints_the_verdict_and_its_status_tells(self, capsys):
        options = ["check", "--model", "mlp", "--steps", "2"]
        assert cli.main(options) == 0
        out, err = capsys.readouterr()
        assert "ring on 2 ranks agrees with one process" in out
        assert "running single on 1 process" in err
        assert cli.main([*options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["passed"] is True
