"""`ss.compare`: where it takes its figures from, and what it says. `tests/prediction` holds it against every method."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.runs import small_job
from prediction.ranks_of import EVERY_STEP, run_on
from shardscope import cli
from shardscope.measure.compare.comparison import ComparedTerm, Comparison, error_text, overview
from shardscope.measure.compare.measured import step_time
from shardscope.measure.compare.of_run import _where_it_ran, compare, comparison_or_reason
from shardscope.runtime import Run
from shardscope.runtime.record.rundir import RunDir

CLUSTER = ss.Cluster.of("a100-80gb", per_node=2)
SPANS = [
    ("compute", "data", 0.0, 1.0), ("compute", "forward", 1.0, 5.0), ("compute", "backward", 5.0, 9.0),
    ("communication", "all_reduce", 8.0, 12.0), ("codec", "encode", 8.5, 9.5), ("compute", "optimizer", 13.0, 15.0),
    ("communication", "all_gather", 14.5, 16.0), ("communication", "recv", 15.0, 19.0),
]  # fmt: skip


REST = {
    "t": 0.0, "lr": 0.1, "loss": 1.0, "samples": 1, "tokens": None, "grad_norm": None, "memory_bytes": 5,
}  # fmt: skip
"""Fields of events on which these tests do not depend."""


def step_of(rank: int, spans: list[tuple[str, str, float, float]], seconds: float) -> dict[str, Any]:
    rows = [[lane, name, start, end, 0] for lane, name, start, end in spans]
    return {"rank": rank, "step_time_s": seconds, "spans": rows}


def test_each_moment_of_a_step_counts_once() -> None:
    found = step_time({1: [step_of(0, SPANS, 20.0)]})
    assert found is not None
    assert found.parts == {
        "data": 1.0, "forward": 4.0, "backward": 3.0, "codec": 1.0, "optimizer": 2.0, "communication": 4.0, "idle": 5.0,
    }  # fmt: skip
    assert found.collectives == {"all_reduce": 3.0, "all_gather": 1.0}


def test_parts_are_those_that_sampling_the_step_finds() -> None:
    draw = random.Random(7)
    kinds = [(lane, name) for lane, name, *_ in SPANS if name != "recv"]
    order = [["data", "forward", "backward"], ["all_reduce", "all_gather"], ["optimizer"], ["encode"]]
    for _ in range(20):
        spans = [
            (*kind, start, start + draw.randint(1, 30))
            for kind in draw.choices(kinds, k=12)
            for start in [draw.randint(0, 90)]
        ]
        counts = dict.fromkeys(("passes", "communication", "optimizer", "codec"), 0)
        for tick in range(130):
            names = {name for _, name, start, end in spans if start <= tick < end}
            levels = [level for level, group in enumerate(order) if names & set(group)]
            if levels:
                counts[[*counts][max(levels)]] += 1
        found = step_time({1: [step_of(0, spans, 130.0)]})
        assert found is not None
        passes = sum(found.parts.get(name, 0.0) for name in ("data", "forward", "backward"))
        assert passes == pytest.approx(counts["passes"])
        for name in ("communication", "optimizer", "codec"):
            assert found.parts.get(name, 0.0) == pytest.approx(counts[name])
        assert sum(found.parts.values()) == pytest.approx(130.0)


def test_parts_are_of_the_rank_that_computes_longest() -> None:
    slow, fast = [("compute", "forward", 0.0, 3.0)], [("compute", "forward", 0.0, 1.0)]
    steps = {number: [step_of(0, fast, 4.0), step_of(1, slow, 4.0)] for number in range(1, 6)}
    found = step_time(steps)
    assert found is not None
    assert (found.rank, found.num_steps, dict(found.parts)) == (1, 3, {"forward": 3.0, "idle": 1.0})


def test_the_rank_that_computes_longest_is_found_after_the_warm_up() -> None:
    cold, slow, fast = ([("compute", "forward", 0.0, seconds)] for seconds in (9.0, 3.0, 1.0))
    steps = {
        number: [step_of(0, cold if number < 3 else fast, 12.0), step_of(1, slow, 12.0)]
        for number in range(1, 5)
    }
    found = step_time(steps)
    assert found is not None
    assert (found.rank, found.num_steps, dict(found.parts)) == (1, 2, {"forward": 3.0, "idle": 9.0})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"predicted": 4.0, "measured": 4.0, "agrees": True}, "exact"),
        ({"predicted": 4.0, "measured": 5.0, "agrees": True, "bounds": (3.0, 6.0)}, "within bounds"),
        ({"predicted": 5.0, "measured": 4.0, "agrees": False}, "+25%"),
        ({"predicted": 3.9, "measured": 4.0}, "-2.5%"),
        ({"predicted": 4.001, "measured": 4.0}, "< 0.1%"),
        ({"predicted": 48.0, "measured": 4.0}, "12 ×"),
        ({"predicted": 0.0, "measured": 4.0}, "-100%"),
        ({"predicted": 4.0, "measured": 0.0}, "not measured"),
        ({"predicted": 0.0, "measured": 0.0}, "0%"),
    ],
)
def test_an_error_is_predicted_over_measured(fields: dict[str, Any], text: str) -> None:
    assert error_text(ComparedTerm("time", "forward", "s", "rank 0", **fields)) == text


@pytest.mark.parametrize(
    ("group", "unit", "agrees", "text"),
    [
        ("bytes", "bytes", False, "+100 B"), ("messages", "messages", False, "+100"),
        ("memory", "bytes", None, "+100 B"),
    ],
)  # fmt: skip
def test_where_nothing_was_measured_the_error_is_a_difference(
    group: Any, unit: str, agrees: bool | None, text: str
) -> None:
    assert error_text(ComparedTerm(group, "ring", unit, "all ranks", 100.0, 0.0, agrees=agrees)) == text


@pytest.fixture
def ran(pool: RankPool, tmp_path: Path) -> Run:
    """Ten steps of local SGD with periods of four."""
    job = ss.Job(
        model="mlp", data="digits", strategy="ring", compression=ss.Compression("local-sgd", every=4), batch=48,
        world_size=pool.world_size, steps=10, record=EVERY_STEP, optimizer="sgd",
    )  # fmt: skip
    run_on(pool, job, tmp_path)
    return Run(RunDir(tmp_path), job)


def test_bytes_are_of_whole_periods_and_the_summarys(ran: Run) -> None:
    found, summary = compare(ran), ran.summary()
    sent = found["bytes", "ring_all_reduce"]
    assert sent.agrees
    assert sent.predicted == sent.measured == summary.bytes_per_step
    assert sent.measured == sum(measured for _, measured in sent.by_rank)
    assert found["time", "step"].measured == summary.step_time_s
    *_, newest = (event["step"] for event in ran.events("memory"))
    held = [event["peak"] for event in ran.events("memory") if event["step"] == newest]
    assert found["memory", "peak"].measured == max(held)
    assert "steps 3 to 10" in " ".join(found.notes)
    assert found["memory", "peak"].predicted == pytest.approx(max(held), rel=0.01)
    assert "batch, temporary tensors and gradients of activations" in " ".join(found.notes)


def test_the_peak_of_one_process_lacks_the_gradients_that_the_step_has_freed() -> None:
    run = ss.launch(small_job(strategy="single", world_size=1, steps=3)).wait(60)
    found = compare(run)
    parts = [found["memory", kind].measured for kind in ("parameters", "optimizer", "activations")]
    peak = found["memory", "peak"]
    assert found["memory", "gradients"].measured > 0
    assert peak.measured == sum(parts)
    assert peak.predicted == peak.simulated == pytest.approx(peak.measured, rel=0.01)


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("strategy", "recompute"), [("zero-2", "none"), ("zero-3", "none"), ("zero-3", "full")]
)
def test_the_peak_of_shards_counts_their_buffers_and_what_is_gathered_at_the_time(
    pool: RankPool, tmp_path: Path, strategy: str, recompute: str
) -> None:
    job = ss.Job(
        model="gpt-nano", data="python-source", strategy=strategy, recompute=recompute, steps=2, optimizer="adamw",
        world_size=pool.world_size, batch=ss.Batch(2 * pool.world_size),
        record=ss.Record(memory_first=2, messages_first=0),
    )  # fmt: skip
    run_on(pool, job, tmp_path)
    found = compare(Run(RunDir(tmp_path), job))
    assert found["memory", "buffers"].agrees
    peak = found["memory", "peak"]
    assert peak.predicted == pytest.approx(peak.measured, rel=0.001)
    parts = [found["memory", kind].predicted for kind in ("activations", "gathered")]
    held = sum(found["memory", kind].predicted for kind in ("parameters", "optimizer", "buffers"))
    assert (held + sum(parts) > 1.02 * peak.predicted) == (strategy == "zero-3" and recompute == "none")


@pytest.mark.slow
def test_buffers_of_shards_include_those_of_the_ring_once_messages_have_been_logged() -> None:
    logged, not_logged = (
        compare(
            ss.launch(small_job(strategy="zero-2", steps=3, record=ss.Record(messages_first=first))).wait(60)
        )
        for first in (3, 0)
    )
    for found in (logged, not_logged):
        assert found["memory", "buffers"].agrees
        assert found["memory", "peak"].predicted == pytest.approx(found["memory", "peak"].measured, rel=0.01)
    assert logged["memory", "buffers"].measured > not_logged["memory", "buffers"].measured


def test_a_wrong_prediction_is_found_and_named(ran: Run) -> None:
    other = ss.predict(ran.job.replace(model="cnn"))
    found = compare(ran, prediction=other)
    assert {row.term for row in found.disagreeing} >= {"parameters", "gradients"}
    assert "parameters" in found.verdict
    assert "differ" in found.verdict


def test_there_is_no_column_without_a_figure(ran: Run) -> None:
    found = compare(ran)
    assert found.columns == ("predicted", "measured")
    assert "simulated" not in found.frame()
    said = json.loads(json.dumps(found.to_dict()))
    assert (said["schema"], said["columns"]) == (1, ["predicted", "measured"])
    assert all("simulated" not in row and "predicted" in row for row in said["rows"])
    first = ComparedTerm("time", "step", "s", "slowest rank", 1.0, 2.0, simulated=1.5)
    with_twin = Comparison("id", "label", "this machine", (first, *found.rows), ())
    assert with_twin.columns == ("predicted", "simulated", "measured")
    assert with_twin.frame()["simulated"].tolist()[0] == 1.5
    assert "1.5 s" in repr(with_twin) and "1.5 s" in with_twin._repr_html_()
    assert "Simulated values are shown only where they differ" in repr(with_twin)


def test_a_simulation_that_repeats_the_prediction_is_a_sentence_and_no_column(ran: Run) -> None:
    rows = [replace(row, simulated=row.predicted * (1 + 1e-9)) for row in compare(ran).rows]
    found = Comparison("id", "label", "this machine", tuple(rows), ())
    assert found.columns == ("predicted", "simulated", "measured")
    text = repr(found)
    assert (
        "The simulated step equals the predicted one in every term, so the table has no column for it."
        in text
    )
    assert "simulated error" not in text


def test_the_times_of_one_rank_say_which_rank_it_is(ran: Run) -> None:
    text = repr(compare(ran))
    assert re.search(r"^Time of a step, rank \d, which computes longest", text, re.MULTILINE)


def test_text_and_html_have_each_row_and_escape_names(ran: Run) -> None:
    found = compare(ran)
    found = Comparison(found.run_id, "<b>mine</b>", found.where, found.rows, found.notes)
    lines, page = repr(found).splitlines(), found._repr_html_()
    assert "<b>mine" not in page
    for row in found.rows:
        assert any(line.split()[:1] == row.term.split()[:1] for line in lines), row.term
        assert f">{row.term}</td>" in page
    table = [line for line in lines if line.endswith(("exact", "%", "×"))]
    assert len({len(line) for line in table}) == 1, "the errors are aligned"


def test_on_a_cluster_terms_without_a_counterpart_are_noted() -> None:
    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=2, steps=3)
    rows = [
        step_of(rank, SPANS, 20.0) | {"peak_memory_bytes": 5, "traffic": {}, "step": 1} for rank in (0, 1)
    ]
    events = [{"event": "start", "rank": rank} for rank in (0, 1)] + [row | {"event": "step"} for row in rows]
    events = [event | REST for event in events]
    run: Any = Mock(
        spec=ss.Run, id="r", name="r", job=job, resized_job=job, cluster=None, events=lambda: events
    )
    found = compare(run, CLUSTER)
    assert found.where == CLUSTER.name
    step = found["time", "step"]
    assert (step.predicted, step.measured) == (ss.predict(job, CLUSTER).step_time_s, 20.0)
    assert found["time", "forward"].predicted == ss.predict(job, CLUSTER).time["forward"].value
    assert any(note.startswith("communication is left out") for note in found.notes)


@pytest.mark.parametrize(
    ("start", "has_time", "backend"),
    [
        ({"device": "cuda:0", "backend": "nccl"}, False, "nccl"),
        ({"device": "cuda:0", "backend": "gloo (shared GPU)"}, False, "gloo"),
        ({"device": "cpu", "backend": "gloo"}, True, "gloo"),
    ],
)
def test_a_run_is_laid_beside_a_prediction_for_the_device_on_which_it_ran(
    start: dict[str, str], has_time: bool, backend: str
) -> None:
    """Not for the one that the job would take on this machine."""
    for device in ("auto", "cuda"):
        job = ss.Job(
            model="mlp",
            data="digits",
            strategy="all-reduce",
            world_size=2,
            steps=3,
            optimizer="sgd",
            device=device,
        )
        step = {"event": "step", "peak_memory_bytes": 5, "traffic": {}, "step": 3}
        events = [{"event": "start", "rank": rank, **start} for rank in (0, 1)]
        events += [step_of(rank, SPANS, 20.0) | step for rank in (0, 1)]
        events = [event | REST for event in events]
        run: Any = Mock(
            spec=ss.Run,
            id="r",
            name="r",
            job=job,
            resized_job=job,
            cluster=None,
            predicted=None,
            events=lambda events=events: events,
        )
        assert _where_it_ran(ss.predict(job), events).step.backend == backend
        for found in (compare(run), compare(run, prediction=ss.predict(job))):
            assert any(row.group == "time" for row in found.rows) == has_time
            assert (
                any("Step time is left out: the ranks compute on GPUs" in note for note in found.notes)
                != has_time
            )


def test_what_cannot_be_compared_is_refused(tmp_path: Path, ran: Run) -> None:
    empty: Any = Mock(spec=ss.Run, id="too-early", job=ran.job, resized_job=ran.job, events=list)
    with pytest.raises(ss.errors.RunUnreadable, match="too-early has nothing to compare.*wait for a step"):
        compare(empty)
    with pytest.raises(ss.SpecError, match=r"prediction is for 1 rank,.*ss.predict"):
        compare(ran, prediction=ss.predict(ss.Job(model="mlp", data="digits", strategy="single")))


def test_the_command_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    run = ss.launch(ss.Job(model="mlp", data="digits", strategy="zero-1", world_size=2, steps=5)).wait(60)
    assert cli.main(["compare", run.id]) == 0
    text = capsys.readouterr().out
    assert (
        "ring_reduce_scatter" in text
        and "Bytes, messages and model states agree with the prediction." in text
    )
    rows = ss.compare(run).rows
    for column in ("predicted", "simulated", "measured"):
        *parts, step = (getattr(row, column) for row in rows if row.group == "time" and row.part_of is None)
        assert sum(parts) == pytest.approx(step)  # the last part is the rest
    assert cli.main(["compare", run.id, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["run"] == run.id
    assert {row["group"] for row in said["rows"]} == {"bytes", "messages", "memory", "time"}
    assert cli.main(["compare", "nothing-of-that-name"]) == 2
    assert [row.term for row in compare(run.id).rows] == [row["term"] for row in said["rows"]]
    assert compare(run.path.name, root=run.path.parent).run_id == compare(run.path).run_id == run.id


def test_the_command_compares_with_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    run = ss.launch(ss.Job(model="mlp", data="digits", strategy="zero-1", world_size=2, steps=5)).wait(60)
    on_a_cluster = ["compare", run.id, "--cluster", "a100-80gb", "--per-node", "2"]
    assert cli.main([*on_a_cluster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["where"] == CLUSTER.name
    assert cli.main([*on_a_cluster, "--calibration", "b200-megatron"]) == 0
    with_b200 = repr(
        compare(run, prediction=ss.predict(run.job, CLUSTER, calibration=ss.Calibration.of("b200-megatron")))
    )
    assert capsys.readouterr().out == f"{with_b200}\n"
    for options, says in (
        (["--per-node", "2"], "--per-node has no effect without --cluster"),
        (["--calibration", "b200-megatron"], "is for a GPU and has no effect on this machine"),
        (["--cluster", "a100-80gb"], "world_size=2 does not match the 8 devices"),
    ):
        assert cli.main(["compare", run.id, *options]) == 2
        assert says in capsys.readouterr().err


def test_an_observed_training_loop_is_compared_in_bytes_and_states(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(6, 5)).square().mean().backward()
            optimizer.step()
    found = compare(run)
    assert {row.term for row in found.rows if row.agrees} >= {"parameters", "gradients", "optimizer"}
    assert found.disagreeing == ()
    assert found["memory", "gradients"].measured == 4 * sum(each.numel() for each in model.parameters())
    for left_out in ("activations", "peak", "Step time"):
        assert any(note.startswith(f"{left_out} is left out") for note in found.notes)
    assert comparison_or_reason(run) == found
    with pytest.raises(ss.SpecError, match="only for the ranks on which it ran"):
        compare(run, CLUSTER)


def test_a_run_that_cannot_be_predicted_has_a_reason() -> None:
    def my_model() -> nn.Module:
        raise AssertionError("only its ranks call it")

    run: Any = Mock(spec=ss.Run, job=ss.Job(model=my_model, data="digits", strategy="single"), cluster=None)
    assert "ss.compare(run) calls them" in str(comparison_or_reason(run))


@pytest.mark.slow
def test_steps_before_compression_begins_are_left_out_and_noted(pool: RankPool, tmp_path: Path) -> None:
    job = ss.Job(
        model="mlp", data="digits", strategy="ring", compression="onebit-adam", optimizer="adamw", batch=48,
        world_size=pool.world_size, steps=8, record=EVERY_STEP,
    )  # fmt: skip
    first = job.compression.uncompressed(job.steps) + 1
    run_on(pool, job, tmp_path)
    found = compare(Run(RunDir(tmp_path), job))
    assert 1 < first < job.steps
    assert f"Times are from step {first} onwards, the first compressed step." in found.notes
    assert found.disagreeing == ()
    assert found.per == found.to_dict()["per"] == "compressed step"
    assert ("time", "step") not in {(row.group, row.term) for row in found.rows}, (
        "the summary's step has all kinds"
    )
    assert "A compressed step took" in found.verdict
    assert "Bytes sent per compressed step, all ranks" in found._repr_html_()
    assert overview([found])[0][-2].endswith(" a compressed step")
    assert {row.term for row in found.rows if row.group == "bytes"} == {
        "packet_all_to_all", "packet_all_gather", "all collectives",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("budget", ["shared", "per-worker"])
def test_a_step_of_asynchronous_workers_is_the_one_of_the_summary(mode: str, budget: str) -> None:
    """All workers compute its gradients together: not the time of one gradient on the slowest of them."""
    job = small_job(
        strategy={"name": "parameter-server", "mode": mode, "budget": budget}, world_size=2, steps=12, record=EVERY_STEP
    )  # fmt: skip
    run = ss.launch(
        job, ss.Cluster.emulated(2, flops="100 MFLOP/s", slowdown={1: 3.0}), preflight=False
    ).wait()
    found = ss.compare(run)
    row = next(each for each in found.rows if each.group == "time" and each.term == found.per)
    assert row.measured == pytest.approx(run.summary().step_time_s)
    assert row.predicted == pytest.approx(ss.predict(job, run.cluster).step_time_s, rel=0.05)
    assert row.ranks == "all workers"
    assert "compute its gradients" in " ".join(found.notes)
    assert found.residual() is None
