"""The same run, asked through every door: summary, file, metrics, tuner, lab and report give the same figures.

The oracle reads the logs as plain JSON and shares no code with the reducer.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.measure.compare.of_run import compare
from shardscope.tuning.measured import TrialReader
from shardscope_widgets.figures._comparison import comparison_info
from shardscope_widgets.report import write_report
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, duration_text, rate_text

OTHER_THAN_TRAINING = {"noise_scale", "consensus"}


class Oracle(NamedTuple):
    """Figures of a run by step, from its log files."""

    loss: dict[int, float]
    seconds: dict[int, float]
    sent_bytes: dict[int, int]
    messages: dict[int, int]
    process_bytes: int
    held_bytes: int
    validation_loss: float | None
    test_loss: float

    @classmethod
    def of(cls, run: ss.Run) -> Oracle:
        logs = [path.read_text().splitlines() for path in sorted(run.path.glob("rank-*.jsonl"))]
        events = [json.loads(line) for lines in logs for line in lines]
        rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        sent: dict[int, list[dict[str, int]]] = defaultdict(list)
        for event in events:
            if event["event"] == "step":
                rows[event["step"]].append(event)
            if event["event"] in ("step", "traffic"):
                sent[event["step"]] += [
                    row for name, row in event["traffic"].items() if name not in OTHER_THAN_TRAINING
                ]
        held: dict[int, int] = {}
        for event in events:
            if event["event"] == "memory":
                held[event["rank"]] = event["peak"]
        evaluated = [event["loss"] for event in events if event["event"] == "eval" and event["rank"] == 0]
        (tested,) = [event["loss"] for event in events if event["event"] == "test" and event["rank"] == 0]
        return cls(
            {step: mean_loss(rows[step]) for step in sorted(rows)},
            {step: seconds_of(rows[step]) for step in sorted(rows)},
            {step: sum(row["sent_bytes"] for row in sent[step]) for step in sorted(rows)},
            {step: sum(row["messages"] for row in sent[step]) for step in sorted(rows)},
            max(event["peak_memory_bytes"] for row in rows.values() for event in row),
            max(held.values()),
            evaluated[-1] if evaluated else None,
            tested,
        )

    def step_time_s(self, kinds: list[list[int]], average: Callable[[list[float]], float]) -> float:
        """Step time of each kind of step without its first two, weighted by how often the kind occurs."""
        medians = [average([self.seconds[step] for step in steps[2:] or steps]) for steps in kinds]
        return sum(len(steps) * each for steps, each in zip(kinds, medians, strict=True)) / len(self.seconds)


def mean_loss(row: list[dict[str, Any]]) -> float:
    """Over the samples of the ranks that computed a loss."""
    known = [event for event in row if event["loss"] is not None]
    samples = [event["samples"] for event in known]
    return sum(e["loss"] * count for e, count in zip(known, samples, strict=True)) / sum(samples)


def seconds_of(row: list[dict[str, Any]]) -> float:
    """On the slowest rank; of workers that share gradients, a share of the time of all."""
    seconds = [event["step_time_s"] for event in row]
    return fmean(seconds) if "gradients" in row[0] else max(seconds)


NOISE = small_job(steps=8, compression="int8", eval_every=4, record=ss.Record(noise_scale=True))
WARM = small_job(steps=9, compression=ss.Compression("powersgd", warmup_steps=4))
SAVED = small_job(steps=9, until=4, strategy="zero-1")
SERVER = small_job(strategy=ss.ParameterServer(mode="async", servers=2), world_size=3, batch=48, steps=8)
CASES = {
    "noise scale, compression, evaluation": (NOISE, [[*range(1, 9)]]),
    "uncompressed warm-up": (WARM, [[1, 2, 3, 4], [5, 6, 7, 8, 9]]),
    "resumed": (SAVED, [[5, 6, 7, 8, 9]]),
    "asynchronous server": (SERVER, [[*range(1, 9)]]),
}


@pytest.mark.parametrize("name", CASES)
def test_all_doors_give_the_same_figures(name: str, tmp_path: Path) -> None:
    job, kinds = CASES[name]
    run = ss.launch(job).wait(120)
    if job.until is not None:
        run = ss.launch(job.replace(until=None), resume=run).wait(120)
    run = ss.Run.attach(run.path)
    oracle, summary, metrics = Oracle.of(run), run.summary(), run.metrics()
    assert list(metrics["step"]) == [step for kind in kinds for step in kind]
    assert list(metrics["loss"]) == pytest.approx(list(oracle.loss.values()))
    assert list(metrics["step_time_s"]) == pytest.approx(list(oracle.seconds.values()), rel=1e-12)
    assert list(metrics["sent_bytes"]) == list(oracle.sent_bytes.values())
    assert metrics["process_bytes"].max() == oracle.process_bytes

    assert (summary.steps, summary.last_step) == (len(oracle.loss), max(oracle.loss))
    assert summary.loss == pytest.approx([*oracle.loss.values()][-1])
    assert summary.loss_mean == pytest.approx(fmean([*oracle.loss.values()][-10:]))
    assert summary.step_time_s == pytest.approx(oracle.step_time_s(kinds, fmean if job is SERVER else median))
    assert (summary.process_bytes, summary.held_bytes) == (oracle.process_bytes, oracle.held_bytes)
    assert (summary.validation_loss, summary.test_loss) == (oracle.validation_loss, oracle.test_loss)
    on_disk = json.loads((run.path / "summary.json").read_text())
    assert on_disk.pop("wall_s") <= (
        summary.wall_s or math.inf
    )  # rank 0 writes it before the others have ended
    assert on_disk.pop("observing_bytes") <= summary.observing_bytes
    assert on_disk.items() <= {**vars(summary), "state": "completed"}.items()

    measured = TrialReader(run).poll()
    assert (measured.steps, measured.bytes) == (summary.steps, sum(oracle.sent_bytes.values()))
    assert measured.messages == sum(oracle.messages.values())
    assert measured.objective("bytes", summary.steps) == pytest.approx(metrics["sent_bytes"].sum())
    assert measured.objective("seconds", 1) == pytest.approx(summary.step_time_s)
    assert measured.objective("memory", 1) == summary.process_bytes
    assert measured.spent_s == pytest.approx(metrics["step_time_s"].sum())
    assert [loss for _, loss, _ in measured.curve][-1:] == [summary.validation_loss]
    assert measured.test is not None
    assert measured.test[0] == summary.test_loss

    trace = Trace.read(run)
    assert [step.sent_bytes for step in trace.steps] == list(oracle.sent_bytes.values())
    assert trace.collectives.total() == measured.bytes
    (row,) = comparison_info([trace])
    assert (row.steps, row.loss, row.step_time_s) == (summary.steps, summary.loss, summary.step_time_s)
    assert (row.bytes_per_step, row.per_second) == (summary.bytes_per_step, summary.samples_per_s)
    assert (row.held_bytes, row.process_bytes) == (summary.held_bytes, summary.process_bytes)

    compared = compare(run)
    sent = sum(
        row.measured for row in compared.rows if row.group == "bytes" and row.term != "all collectives"
    )
    took = compared["time", compared.per].measured
    if len(kinds) == 1:
        assert compared.per == "step"
        assert (sent, took) == (pytest.approx(summary.bytes_per_step), pytest.approx(summary.step_time_s))
    else:
        assert compared.per == "compressed step"
        assert "Bytes sent per compressed step, all ranks" in repr(compared)
        assert took == pytest.approx(median([oracle.seconds[step] for step in kinds[-1][2:]]))
        assert sent == pytest.approx(fmean(oracle.sent_bytes[step] for step in kinds[-1][2:]))
    *_, newest = (event["step"] for event in run.events("memory"))
    peaks = [event["peak"] for event in run.events("memory") if event["step"] == newest]
    assert compared["memory", "peak"].measured == max(peaks) == summary.held_bytes

    page = write_report([run], tmp_path / "report.html").read_text()
    table = re.search(r"<tbody><tr>(.*?)</tr>", page)
    assert table is not None
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", table[1])]
    assert cells[2:9] == [
        str(summary.last_step), f"{summary.loss:.4f}", duration_text(summary.step_time_s),
        rate_text(summary.samples_per_s, "samples"), bytes_text(summary.bytes_per_step),
        bytes_text(summary.held_bytes), bytes_text(summary.process_bytes),
    ]  # fmt: skip
