"""`ss.explain`: which loss it names, and what it suggests; each loss is made by hand, each change really predicted."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import run as run_process
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import shardscope as ss
from conformance.events import step_event
from shardscope.measure.explain import words
from shardscope.measure.explain.changes import Predictor, best_change
from shardscope.measure.explain.losses import Loss, MeasuredStep, computing_s, losses
from shardscope.measure.explain.of_run import Explanation, explanation, measured_step, second_remedy
from shardscope.measure.explain.verdict import verdict
from shardscope.measure.explain.words import changed_text, loss_change_text, speed_text
from shardscope.measure.pipeline_waits import PipelineWaits, pipeline_waits, schedule_bubble
from shardscope.methods.strategies.pipeline import with_split
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.stragglers import Straggler
from shardscope.runtime.launcher.preflight import Preflight, preflight
from widgets.fake_runs import schedule_events

pytestmark = pytest.mark.usefixtures("two_known_cores")

GPT: dict[str, Any] = {"model": "gpt-nano", "data": "python-source"}
MLP: dict[str, Any] = {"model": "mlp", "data": "digits"}
SLOW = ss.Link(bandwidth="50 Mbit/s", latency="1 ms")


def parts(**seconds: float) -> dict[tuple[str, str], float]:
    """Return the parts of one rank's step; `idle` and `communication` are lanes of their own."""
    lanes = {"idle": ("idle", "idle"), "sent": ("communication", "all_reduce")}
    return {lanes.get(name, ("compute", name)): value for name, value in seconds.items()}


def step(*ranks: dict[tuple[str, str], float], waiting: float = 0.0, **about: Any) -> MeasuredStep:
    return MeasuredStep(
        max(sum(rank.values()) for rank in ranks), ranks, [*map(computing_s, ranks)], waiting, **about
    )


def slow(rank: int, times: float, **about: Any) -> Straggler:
    return Straggler("straggler", (), times, "", rank, "forward", times, **{"wait_s": 0.1, **about})


def explained(job: ss.Job, measured: MeasuredStep, predict: Predictor = predict_job) -> Any:
    return explanation(measured, job, predict, cores=2)


def on_slow_devices(job: ss.Job) -> JobPrediction:
    """Predict a job on devices on which computing takes all the time, whatever this machine is busy with."""
    cluster = ss.Cluster.of("v100-16gb", nodes=1, per_node=job.world_size)
    slow = cluster.device.replace(peak_flops={"fp32": 2e10, "fp16": 2e10})
    return predict_job(job, cluster.replace(device=slow))


PIPELINE = ss.Job(**GPT, strategy="pipeline:gpipe", world_size=4, batch=ss.Batch(64, micro_batch=32))


def in_pipeline(*computing: float, waiting: float, uneven: float = 0.6, **about: Any) -> MeasuredStep:
    ranks = [parts(forward=each / 3, backward=each * 2 / 3, idle=1 - each) for each in computing]
    return step(*ranks, pipeline=PipelineWaits(waiting, 0.6, uneven), **about)


@pytest.mark.slow
def test_a_pipeline_with_few_micro_batches_is_told_how_many_would_help() -> None:
    found = explained(PIPELINE, in_pipeline(*[0.38] * 4, waiting=0.62), on_slow_devices)
    assert (found.cause, round(found.share, 2)) == ("pipeline bubble", 0.6)
    then = PIPELINE.replace(**found.change)
    assert then.num_micro_batches > 2
    assert found.sentence.startswith(
        "Ranks wait 62% of the time (mean over ranks): 60% in the bubble of 4 stages and 2 micro-batches, 2% for "
        "messages or other programs. "
        f"{then.num_micro_batches} micro-batches instead of 2 would take the bubble from 60% to "
        f"{schedule_bubble(then):.0%}; predicted: "
    )
    assert found.expected == pytest.approx(
        on_slow_devices(then).samples_per_s / on_slow_devices(PIPELINE).samples_per_s
    )


def test_the_parts_of_the_waiting_add_up_to_it_and_are_named() -> None:
    told = "Ranks wait 73% of the time (mean over ranks): 60% in the bubble of 4 stages and 2 micro-batches"
    taking_turns = explained(PIPELINE, in_pipeline(*[0.27] * 4, waiting=0.73, shares_cores=True))
    assert taking_turns.sentence.startswith(f"{told}, 13% for messages or one of 2 cores.")
    several = explained(PIPELINE, in_pipeline(0.2, 0.2, 0.5, 0.51, waiting=0.73, uneven=0.67))
    assert several.sentence.startswith(
        f"{told}, 7% for stages of unequal cost, 6% for messages or other programs."
    )


def test_the_slow_rank_of_a_pipeline_is_the_one_that_the_status_names() -> None:
    said = "13% for stages of unequal cost (rank 3 computes 2.5 times as long as the others)."
    about = {"waiting": 0.73, "uneven": 0.73, "straggler": slow(3, 2.5)}
    one_slow = explained(PIPELINE, in_pipeline(0.2, 0.2, 0.2, 0.5, **about))
    assert said in one_slow.sentence
    assert {loss.rank for loss in one_slow.losses if loss.share} == {3}
    of_two = in_pipeline(0.2, 0.5, waiting=0.73, uneven=0.73, straggler=slow(1, 2.5))
    assert (
        "(rank 1 computes 2.5 times as long as the other)"
        in explained(PIPELINE.replace(world_size=2), of_two).sentence
    )


def test_passes_while_messages_travel_count_as_computing_in_status_and_explanation() -> None:
    """Stage 3 is slowest. Stages 1 and 2 compute while their messages travel, which once hid their passes."""
    events = [event for number in range(1, 21) for event in _with_sends(number)]
    log = RunLog.of(PIPELINE)
    log.feed(events)
    found = measured_step(events, PIPELINE, None)
    assert found is not None
    assert log.straggler is not None
    assert found.straggler is not None
    assert (log.straggler.rank, found.straggler.rank, found.slowest) == (3, 3, 3)
    assert log.straggler.value == found.straggler.value == pytest.approx(1.5)
    assert found.computed == pytest.approx([0.2, 0.2, 0.2, 0.3])


def _with_sends(number: int) -> list[dict[str, Any]]:
    start = float(number)
    spans = [
        [["compute", "forward", start, start + (0.3 if rank == 3 else 0.2), 0]]
        + [["communication", "send", start, start + 0.19, 1]] * (rank in {1, 2})
        for rank in range(4)
    ]
    return [step_event(number, rank, spans=own, step_time_s=0.5) for rank, own in enumerate(spans)]


def test_a_rank_that_the_status_names_is_a_straggler_unless_no_other_rank_waits_for_it() -> None:
    ranks = [parts(forward=0.5), parts(forward=0.5), parts(forward=0.56)]
    in_turn, *_ = losses(step(*ranks, waiting=0.2))
    assert in_turn.cause == "uneven steps"
    named, *_ = losses(step(*ranks, waiting=0.2, straggler=slow(2, 1.15)))
    assert (named.cause, named.rank) == ("straggler", 2)
    assert not losses(step(*ranks, waiting=0.2, straggler=slow(2, 1.15, wait_s=0.0)))[0].share


def test_waiting_for_a_slower_stage_is_not_the_bubble() -> None:
    job = ss.Job(**GPT, strategy="pipeline", world_size=2, batch=ss.Batch(64, micro_batch=8))
    measured = step(
        parts(forward=0.2, idle=0.6), parts(forward=0.7, idle=0.1),
        pipeline=PipelineWaits(0.4, schedule_bubble(job) or 0.0, 0.38),
    )  # fmt: skip
    found = explained(job, measured)
    assert (found.cause, round(found.share, 2)) == ("uneven stages", 0.27)
    assert found.sentence.endswith(
        "Layers split by speed instead of time may help; how much is not predicted."
    )
    assert (found.change, found.expected) == ({"strategy": job.strategy.replace(split="speed")}, None)
    by_speed = explained(job.replace(strategy=found.change["strategy"]), measured)
    assert by_speed.change["strategy"].split == "even"


def test_a_second_loss_has_a_change_of_its_own() -> None:
    job = ss.Job(**GPT, strategy="pipeline", world_size=2, batch=ss.Batch(64, micro_batch=8))
    run = SimpleNamespace(job=job, reduced=lambda: SimpleNamespace(split=(2, 4)))
    first, second = Loss("pipeline bubble", 0.4, 1), Loss("uneven stages", 0.2, 1)
    found = Explanation("", first.cause, first.share, None, None, (first, second))
    sentence, change = second_remedy(run, found)
    assert words.second_text(
        (first._replace(share=0.428), second._replace(share=0.254)), second, change, job
    ).startswith("Stages of unequal cost: 25%.")
    assert sentence == (
        "Stages of unequal cost: 20%. Layers split by speed instead of time may help; how much is not predicted."
    )
    assert change == {"strategy": job.strategy.replace(split="speed")}
    assert second_remedy(run, replace(found, losses=(first, second._replace(share=0.05)))) is None


def test_a_change_keeps_the_split_that_the_ranks_measured_and_a_comparison_names_another(monkeypatch) -> None:
    job = ss.Job(**MLP, strategy="pipeline", world_size=2, batch=ss.Batch(32, micro_batch=8), steps=8)
    run = ss.launch(job).wait(60)
    split = run.reduced().split
    assert (len(split), min(split) > 0) == (2, True)
    change = {"batch": job.batch.replace(micro_batch=4)}
    found, predicted = Explanation("", "pipeline bubble", 0.5, change, 2.0), []

    def explained_by(_step: MeasuredStep, asked: ss.Job, predict: Predictor, **_: Any) -> Explanation:
        predicted.extend([predict(asked), predict(asked.replace(**change))])
        return found

    monkeypatch.setattr("shardscope.measure.explain.of_run.explanation", explained_by)
    suggested = ss.explain(run).change
    assert suggested == change | {"strategy": job.strategy.replace(split=split)}
    # the promise is the prediction that the launch of the change shows
    assert [each.job.strategy.split for each in predicted] == [split, split]
    assert predicted[1].step_time_s == pytest.approx(
        preflight(run.job.replace(**suggested)).prediction.step_time_s
    )
    assert with_split(run.job, split).replace(**suggested) == run.job.replace(**suggested)

    other = ss.launch(run.job.replace(strategy=job.strategy.replace(split=split[::-1]))).wait(60)
    names = [", ".join(map(str, each)) for each in (split, split[::-1])]
    if split != split[::-1]:
        text = repr(ss.compare_runs([run, other]))
        assert all(f"split {name}" in text for name in names)
        told = verdict(other, run)
        assert f"Its stages have {names[1]} layers, and {names[0]} before." in f"{told.finding}{told.more}"
    same = ss.launch(run.job.replace(**suggested, steps=2)).wait(60)
    assert "strategy.split" not in ss.compare_runs([run, same]).setting_names


def test_measured_waiting_is_that_of_the_schedule_where_stages_cost_the_same() -> None:
    events = [event for number in range(1, 9) for event in schedule_events(4, 2, step=number)]
    found = pipeline_waits(events, PIPELINE)
    assert found == pytest.approx((0.6, 0.6, 0.6))
    assert pipeline_waits(events[:3], PIPELINE) is None  # rank 3 has not reported it
    assert pipeline_waits(events, ss.Job(**GPT, world_size=4, batch=64)) is None


def test_communication_while_ranks_compute_counts_and_is_named() -> None:
    overlapped = step(*[parts(forward=0.4, sent=0.6)] * 2, sent_bytes=[9e5, 9e5], hidden=[0.5, 0.55])
    sentence = explained(ss.Job(**GPT, world_size=2, batch=32, link=SLOW), overlapped).sentence
    assert "Communication takes 60% of the step, 50% while ranks also compute: 900 kB per rank" in sentence
    hidden = explained(
        ss.Job(**GPT, world_size=2, batch=32, link=SLOW), replace(overlapped, hidden=[0.7, 0.6])
    )
    assert "60% of the step, all of it while ranks also compute: 900 kB" in hidden.sentence


def test_a_slow_link_is_told_which_compression_pays() -> None:
    job = ss.Job(**GPT, world_size=2, batch=32, link=SLOW)
    found = explained(job, step(*[parts(forward=0.2, backward=0.2, sent=0.6)] * 2, sent_bytes=[9e5, 9e5]))
    assert found.cause == "communication"
    assert (
        "Communication takes 60% of the step: 900 kB per rank over a link of 50 Mbit/s, 1 ms."
        in found.sentence
    )
    assert found.change["compression"].is_on
    assert job.replace(**found.change).label in preflight(job.replace(**found.change)).prediction.job.label


def test_the_mildest_compression_with_nearly_the_largest_gain_is_chosen() -> None:
    job = ss.Job(**GPT, world_size=2, batch=32, link=SLOW)
    chosen = best_change("communication", job, predict_job, cores=2)
    assert chosen is not None
    sent = partial(lambda name: predict_job(job.replace(compression=name)).sent_bytes.max())
    assert sent("topk") < chosen.prediction.sent_bytes.max() < sent("none")


def test_a_compressed_run_is_not_told_to_compress() -> None:
    job = ss.Job(**GPT, world_size=2, batch=32, link=SLOW, compression="int8")
    chosen = best_change("communication", job, predict_job, cores=2)
    assert chosen is not None
    assert chosen.job.compression == job.compression
    assert chosen.job.batch.global_batch > 32


def test_one_slow_rank_is_named() -> None:
    job = ss.Job(**GPT, world_size=3, batch=48)
    fast, slow = parts(forward=0.4, sent=0.6), parts(forward=0.9, sent=0.1)
    found = explained(job, step(fast, fast, slow, waiting=0.35))
    assert (found.cause, found.losses[0].rank, found.expected) == ("straggler", 2, None)
    assert found.change["batch"].shares == "measured"
    assert found.sentence.endswith("The batch divided by measured speed may help; how much is not predicted.")
    assert (
        "Ranks wait 50% of the step for rank 2, which computes 2.2 times as long as the others."
        in found.sentence
    )


def test_a_named_rank_computes_as_much_longer_as_its_alarm_says() -> None:
    """The alarm compares medians of steps, which other ranks' pauses do not move."""
    fast = parts(forward=0.4, sent=0.6)
    measured = step(fast, fast, parts(forward=0.9, sent=0.1), waiting=0.35, straggler=slow(2, 1.9))
    assert (
        "rank 2, which computes 1.9 times as long"
        in explained(ss.Job(**GPT, world_size=3, batch=48), measured).sentence
    )


def test_a_straggler_on_a_slow_node_is_told_what_shares_by_speed_gain() -> None:
    """Three nodes, one of half the speed, do the work of 2.5, and at the speed of the slowest that of 1.5."""
    job = ss.Job(**GPT, world_size=3, batch=60)
    cluster = ss.Cluster.emulated(nodes=3, flops="100 MFLOP/s", slowdown={2: 2.0})
    chosen = best_change("straggler", job, partial(predict_job, cluster=cluster), cores=2)
    assert chosen is not None
    assert chosen.change["batch"].shares == "measured"
    assert chosen.speed_up == pytest.approx(2.5 / 1.5, rel=0.02)


def test_ranks_that_take_turns_on_few_cores_are_not_called_stragglers() -> None:
    alike = [parts(forward=0.6, sent=0.1)] * 4
    (first, *_) = losses(step(*alike, waiting=0.3, shares_cores=True))
    assert (first.cause, round(first.share, 2)) == ("shared cores", 0.43)


def test_ranks_that_are_slow_in_turn_with_a_core_each_point_to_other_programs() -> None:
    found = explained(
        ss.Job(**GPT, world_size=2, batch=32), step(*[parts(forward=0.8, sent=0.1)] * 2, waiting=0.2)
    )
    assert (found.cause, found.change) == ("uneven steps", None)
    assert found.sentence.startswith(
        "Ranks wait 22% of the step for each other: in each step, a different rank is the slowest"
    )


def test_a_server_that_sends_most_is_named_with_its_role() -> None:
    job = ss.Job(**GPT, strategy="parameter-server", world_size=4, batch=32, link=SLOW)
    measured = step(
        *[parts(forward=0.3, sent=0.7)] * 4, sent_bytes=[3e6, 1e6, 1e6, 1e6],
        roles=[job.strategy.role(rank, 4) for rank in range(4)],
    )  # fmt: skip
    found = explained(job, measured)
    assert found.cause == "server"
    assert "rank 0 (server and worker) sends 3 MB, 3 times as much as each other rank" in found.sentence
    assert found.change.keys() == {"strategy"}
    assert found.expected > 1.1


def test_another_strategy_of_a_mesh_leaves_its_model_divided() -> None:
    layout = ss.Layout(data=4, tensor=2)
    job = ss.Job(**GPT, layout=layout, strategy="tree", batch=32, link=SLOW)
    found = best_change("server", job, predict_job, cores=2)
    assert found.job.strategy.tensor == 2
    assert found.job.strategy.data.name in {"all-reduce", "ring", "hierarchical"}


def test_small_operations_ask_for_a_larger_batch() -> None:
    job = ss.Job(**GPT, world_size=2, batch=2)
    measured = step(*[parts(forward=0.4, backward=0.5, sent=0.1)] * 2, predicted=predict_job(job).time)
    found = explained(job, measured)
    assert found.cause == "small operations"
    assert found.change["batch"].global_batch > 2


def test_reading_data_is_named_with_advice_but_without_a_change() -> None:
    found = explained(ss.Job(**MLP, world_size=2), step(*[parts(data=0.5, forward=0.5)] * 2))
    assert (found.cause, found.change, found.expected) == ("data", None, None)
    assert found.sentence.startswith("Reading data takes 50% of the step.")


def test_a_run_that_only_computes_has_little_to_gain() -> None:
    found = explained(ss.Job(**GPT, strategy="single"), step(parts(forward=0.5, backward=0.45, idle=0.05)))
    assert (found.cause, found.change) == ("none", None)
    assert found.sentence.startswith("95% of the step is computation.")
    assert found.sentence.endswith("there is little to gain.")


def test_a_step_that_is_mostly_outside_the_passes_is_not_called_computation() -> None:
    found = explained(ss.Job(**GPT, strategy="single"), step(parts(forward=0.05, idle=0.95)))
    assert (found.cause, found.change, round(found.share, 2)) == ("idle", None, 0.95)


def test_workers_that_wait_for_an_asynchronous_server_are_not_said_to_share_cores() -> None:
    job = ss.Job(**MLP, strategy="parameter-server:async", world_size=3, batch=66)
    serving, working = parts(forward=0.3, sent=0.01), parts(forward=0.05, sent=0.9)
    measured = step(
        serving, working, working, sent_bytes=[2e6, 1e6, 1e6],
        roles=[job.strategy.role(rank, 3) for rank in range(3)],
    )  # fmt: skip
    assert explained(job, measured).cause == "server"


def test_a_job_that_cannot_be_predicted_is_explained_without_a_change() -> None:
    job = ss.Job(**GPT, world_size=2, batch=32, link=SLOW)
    found = explanation(step(*[parts(forward=0.4, sent=0.6)] * 2), job, lambda _job: None, cores=2)
    assert (found.cause, found.change) == ("communication", None)
    assert found.sentence.endswith("No change to the job is predicted to make it faster.")


def test_there_is_no_step_before_all_ranks_have_recorded_one() -> None:
    job = ss.Job(**MLP, world_size=2)
    events = [{"event": "step", "rank": 0, "step": 1, "step_time_s": 1.0, "spans": [], "traffic": {}}]
    assert measured_step(events, job, None) is None


def test_the_speed_after_a_change_is_told_beside_the_predicted_one() -> None:
    what = changed_text(PIPELINE.replace(batch=ss.Batch(64, micro_batch=8)), PIPELINE)
    assert speed_text(what, 1.28, 1.23) == (
        "Speed: 28% faster with 8 micro-batches instead of 2 (samples per second; predicted: 23% faster)."
    )
    assert speed_text(what, 2.54, None).startswith("Speed: 2.5 times faster with ")
    assert speed_text(what, 0.9, None).startswith("Speed: 11% slower with ")


def test_a_difference_is_called_noise_while_the_step_times_of_both_runs_overlap() -> None:
    apart, overlapping = ((10e-3, 12e-3), (8e-3, 9e-3)), ((10e-3, 12e-3), (9e-3, 11e-3))
    assert "noise" not in speed_text("Strategy ring", 1.2, None, apart)
    assert speed_text("Strategy ring", 1.1, 1.2, overlapping) == (
        "Speed: 10% faster with strategy ring, within the noise (the middle half of the steps took 10 ms to 12 ms "
        "before and 9 ms to 11 ms now; predicted: 20% faster); repeat both runs with nothing else running."
    )


def test_step_times_are_compared_for_equally_many_samples() -> None:
    alike, twice = ((10e-3, 12e-3), (10e-3, 12e-3)), ((10e-3, 12e-3), (20e-3, 23e-3))
    assert "noise" not in speed_text("A global batch of 64 instead of 32", 2.0, None, alike, 2.0)
    text = speed_text("A global batch of 64 instead of 32", 1.02, None, twice, 2.0)
    assert text.startswith("Speed: 2% faster with a global batch of 64 instead of 32, within the noise (")
    assert "20 ms to 23 ms now, with 2 times the samples)" in text


def timed_run(job: ss.Job, step_s: float) -> Any:
    """Return what a verdict asks of a run all of whose steps take equally long."""
    return SimpleNamespace(
        cluster=None,
        job=job,
        path=Path("a folder without recorded constants"),
        summary=lambda: SimpleNamespace(samples_per_s=job.batch.global_batch / step_s),
        predicted=None,
        reduced=lambda: SimpleNamespace(split=()),
        metrics=lambda: pd.DataFrame({"step_time_s": [step_s] * 20}),
        tail=lambda: SimpleNamespace(poll=list),
    )


@pytest.mark.parametrize("has_spans", [True, False])
def test_a_verdict_begins_with_what_became_of_the_loss_if_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, has_spans: bool
) -> None:
    steps = [in_pipeline(*[0.35] * 4, waiting=0.65), in_pipeline(*[0.48] * 4, waiting=0.52)]
    measured = iter(steps if has_spans else [None, None])
    monkeypatch.setattr("shardscope.measure.explain.verdict.measured_step", lambda *_: next(measured))
    monkeypatch.setattr(
        "shardscope.measure.explain.verdict.preflight",
        lambda job, cluster, launched: Preflight(on_slow_devices(job)),
    )
    changed = PIPELINE.replace(batch=ss.Batch(64, micro_batch=8))
    told = verdict(timed_run(changed, 0.3), timed_run(PIPELINE, 0.4))
    assert told is not None
    speed = told.more if has_spans else told.finding
    assert speed.startswith(
        "Speed: 33% faster with 8 micro-batches instead of 2 (samples per second; predicted: "
    )
    assert told.finding.startswith("Ranks wait 52% of the time, 65% before: ") is has_spans
    assert bool(told.more) is has_spans


def test_what_became_of_the_largest_loss_is_told_in_its_own_terms() -> None:
    before, after = in_pipeline(*[0.35] * 4, waiting=0.65), in_pipeline(*[0.48] * 4, waiting=0.52)
    assert loss_change_text(losses(before)[0], before, after) == (
        "Ranks wait 52% of the time, 65% before: 52% in the bubble (60% before), 0% for messages or other programs "
        "(5% before)."
    )
    split = in_pipeline(0.1, 0.4, 0.4, 0.4, waiting=0.7, uneven=0.68)
    assert loss_change_text(losses(before)[0], before, split) == (
        "Ranks wait 70% of the time, 65% before: 60% in the bubble (60% before), 8% for stages of unequal cost (0% "
        "before), 2% for messages or other programs (5% before)."
    )
    before, after = (step(*[parts(forward=1 - sent, sent=sent)] * 2) for sent in (0.6, 0.2))
    text = loss_change_text(losses(before)[0], before, after)
    assert text == "Communication takes 20% of the step, 60% before."


def test_explaining_needs_no_torch() -> None:
    code = "import shardscope.measure.explain.of_run, sys; sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code], check=False).returncode == 0
