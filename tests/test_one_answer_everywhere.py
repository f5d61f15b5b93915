"""One question, all doors: panel, command line, Python and report give the same answer, to the digit shown."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from shardscope.analytic import communication
from shardscope.calibration import host_calibration
from shardscope.calibration.host_calibration import HostCalibration, HostMachine
from shardscope.cli import main
from shardscope.measure.accuracy import inside_text
from shardscope.planner.explain import seconds
from shardscope.planner.table import advice, is_full
from shardscope.runlog.figures import figure_text
from shardscope.spec.layout import short
from shardscope.spec.units import bit_rate_text, bytes_text, duration_text
from shardscope_widgets import (
    CommunicationCalculator,
    MemoryCalculator,
    PipelineExplorer,
    Planner,
    Twin,
    figures,
)
from shardscope_widgets.communication_calculator._calculator import answers
from shardscope_widgets.report import report_on
from shardscope_widgets.training_lab._payoff import PayoffPanel

GIB = 2**30
LAYOUTS = {
    "gpt3-175b": ("a100-80gb", 128, {"data": 16, "tensor": 8, "pipeline": 8, "global_batch": 1536}),
    "llama-3-8b": ("h100-80gb", 1, {"data": 8, "zero": 3, "global_batch": 8}),
    "llama-3-70b": ("h100-80gb", 1, {"tensor": 8, "sequence_parallel": True, "global_batch": 8}),
}
"""Device, nodes and layout by model; the last one does not fit."""
SEARCHES = {"gpt3-175b": ("a100-80gb", 128), "llama-3-70b": ("h100-80gb", 1), "llama-3-8b": ("h100-80gb", 2)}
Ask = Callable[[list[str]], str]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """Run a command and return what it prints."""

    def asked(arguments: list[str]) -> str:
        with redirect_stdout(StringIO()) as out:
            main(arguments)
        return out.getvalue()

    return asked


def flags(values: dict[str, Any]) -> list[str]:
    """Return the options of a command for fields of a layout."""
    named = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    return [part for name, value in named for part in ([name] if value is True else [name, str(value)])]


def number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return found[1]


def same(shown: Iterable[str], value: float) -> None:
    """Check that each text is the value, rounded to the digits that it has."""
    for text in shown:
        decimals = len(text.partition(".")[2])
        assert text == f"{value:.{decimals}f}", (text, value)


@pytest.mark.parametrize("model", LAYOUTS)
class TestOfALayout:
    @pytest.fixture
    def doors(self, model: str, ask: Ask) -> tuple[ss.Prediction, MemoryCalculator, str, dict[str, Any]]:
        device, nodes, layout = LAYOUTS[model]
        command = ["predict", model, device, "--nodes", str(nodes), *flags(layout)]
        found = ss.predict(model, ss.Cluster.of(device, nodes=nodes), ss.Layout(**layout))
        panel = MemoryCalculator(model=model, device=device, **layout)
        return found, panel, ask(command), json.loads(ask([*command, "--json"]))

    def test_it_is_named_with_batch_and_sequence_length(self, model: str, doors: Any) -> None:
        found, panel, text, data = doors
        named = short(found.layout)
        work = f"global batch {found.layout.global_batch:,}, sequence length {found.model.seq:,}"
        for said in (text, repr(found), html.unescape(panel._size.value)):
            assert named in said
            assert work in said
        assert (
            data["layout"]
            == found.layout.model_dump(mode="json")
            == panel.chosen_layout().model_dump(mode="json")
        )
        assert (data["model"], data["seq"]) == (model, found.model.seq)

    def test_does_it_fit(self, model: str, doors: Any) -> None:
        found, panel, text, data = doors
        assert found.fits is panel.verdict.fits is data["fits"] is ("does not fit" not in text)
        assert panel.verdict.sentence.startswith("Fits" if found.fits else "Does not fit")

    def test_peak_and_room(self, model: str, doors: Any) -> None:
        found, panel, text, data = doors
        assert found.peak_bytes == data["peak_bytes"] == panel.term.value
        assert found.room_bytes == data["room_bytes"] == panel.info.capacity_bytes
        same(
            [number(r"per device ([\d.]+) GiB of", each) for each in (text, repr(found))],
            found.peak_bytes / GIB,
        )
        same([number(r"of ([\d.]+) GiB for tensors", text)], found.room_bytes / GIB)

    def test_step_time_and_mfu(self, model: str, doors: Any) -> None:
        found, _, text, data = doors
        assert data["step_time_s"] == found.step_time_s
        assert f"step {duration_text(found.step_time_s)} (" in text
        assert data["mfu"] == found.mfu
        same([number(r"MFU ([\d.]+)%", text)], 100 * found.mfu)


@pytest.mark.parametrize("model", SEARCHES)
class TestOfAPlan:
    @pytest.fixture
    def doors(self, model: str, ask: Ask) -> tuple[ss.Plans, Planner, str, dict[str, Any]]:
        device, nodes = SEARCHES[model]
        command = ["plan", model, device, "--nodes", str(nodes)]
        panel = Planner(model=model, device=device, nodes=nodes)
        plans = ss.plan(model, ss.Cluster.of(device, nodes=nodes))
        return plans, panel, ask(command), json.loads(ask([*command, "--json"]))

    def test_best_layout_and_whether_it_fits_without_offloading(self, model: str, doors: Any) -> None:
        plans, panel, text, data = doors
        assert panel.plans.best.layout == plans.best.layout
        assert data["plans"][0]["layout"] == plans.best.layout.model_dump(mode="json")
        named = text.splitlines()[2].split("  ")[-1]
        advised = f"Plan {panel.chosen} is recommended. {advice(plans)}"
        assert advised in text
        assert advice(plans) in html.unescape(panel.screen.advice.value)
        panel.chosen = 1  # it shows the recommended plan first
        assert named in html.unescape(panel.screen.advice.value)
        assert named in repr(plans)
        only = {plans.needs_offload, panel.plans.needs_offload, data["needs_offload"]}
        assert only == {model == "llama-3-70b"}
        for said in (text, panel.screen.status.value, repr(plans)):
            assert ("fits only with offloading" in said) is plans.needs_offload
        is_tight = is_full(panel.plans.row(int(panel.plans.order[panel.chosen - 1])))
        assert ("ss-status warning" in panel.screen.status.value) is (plans.needs_offload or is_tight)

    def test_step_memory_and_cost(self, model: str, doors: Any) -> None:
        plans, panel, text, data = doors
        best, row = plans.best, data["plans"][0]
        assert (row["step_time_s"], row["memory_bytes"], row["mfu"]) == (
            best.step_time_s,
            best.memory_bytes,
            best.mfu,
        )
        assert panel.plans.best == best
        panel.chosen = 1  # it shows the recommended plan first
        for said in (text, panel.screen.status.value):
            assert seconds(best.step_time_s) in said
        same([number(r"([\d.]+) GiB of", panel.screen.status.value)], best.memory_bytes / GIB)
        same([number(r"\$\S+\s+([\d.]+) GiB", text)], best.headroom_bytes / GIB)
        same([number(r"MFU ([\d.]+)%", panel.screen.status.value)], 100 * best.mfu)

    def test_a_plan_is_predicted_as_it_was_ranked(self, model: str, doors: Any) -> None:
        plans, _, _, _ = doors
        cluster, best = plans.asked.cluster, plans.best
        found = ss.predict(model, cluster, best.layout, software=best.software)
        assert found.step_time_s == pytest.approx(best.step_time_s)
        assert found.peak_bytes == pytest.approx(best.memory_bytes)
        assert found.mfu == pytest.approx(best.mfu)
        assert found.fits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    job = ss.Job(model="gpt-nano", data="python-source", strategy="zero-3", world_size=2, steps=8, batch=8)
    return ss.launch(job, root=tmp_path_factory.mktemp("runs")).wait(110)


@pytest.fixture(scope="module")
def told_of(run: ss.Run, ask: Ask) -> dict[str, Any]:
    twin = Twin(run, root=run.path.parent)
    twin.wait(110)
    twin._hit_rate.wait(60)
    path, findings = report_on([run], run.path.parent / "report.html", title="Report")
    name = str(run.path)
    return {
        "compare": ss.compare(run), "text": ask(["compare", name]), "show": ask(["show", name]),
        "json": json.loads(ask(["compare", name, "--json"])), "twin": twin, "card": run._repr_html_(),
        "report": html.unescape(path.read_text()), "findings": findings,
        "accuracy": ask(["accuracy", "--root", str(run.path.parent)]),
    }  # fmt: skip


class TestOfARun:
    def row(self, told_of: dict[str, Any], group: str, term: str) -> Any:
        """Return a row of the comparison, which the command and the Twin have as well."""
        row = told_of["compare"][group, term]
        other = next(
            each for each in told_of["json"]["rows"] if (each["group"], each["term"]) == (group, term)
        )
        twin = told_of["twin"].comparison[group, term]
        for column in ("predicted", "measured"):
            values = [getattr(row, column), other[column], getattr(twin, column)]
            assert values == pytest.approx([values[0]] * 3)
        return row

    def test_predicted_step_and_interval(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        known, row = run.predicted, self.row(told_of, "time", "step")
        assert known is not None
        assert row.predicted == pytest.approx(known.step_time_s)
        assert row.interval == pytest.approx(known.interval)
        assert f"({duration_text(known.step_time_s)} predicted)" in told_of["text"]
        for said in (told_of["text"], told_of["twin"].screen.table.value, told_of["report"]):
            assert " to ".join(map(duration_text, known.interval)) in said

    def test_measured_step(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        took = duration_text(run.summary().step_time_s)
        assert self.row(told_of, "time", "step").measured == pytest.approx(run.summary().step_time_s)
        for said in (
            told_of["show"],
            told_of["text"],
            told_of["twin"].screen.status.value,
            told_of["report"],
            run._repr_html_(),
        ):
            assert took in said

    def test_peak_memory_per_rank(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        row = self.row(told_of, "memory", "peak")
        assert row.measured == run.summary().held_bytes
        assert row.predicted == ss.predict(run.job).held_bytes
        assert f"peak memory per rank {bytes_text(row.predicted)}" in repr(ss.predict(run.job))
        for said in (
            told_of["show"],
            told_of["text"],
            told_of["twin"].screen.table.value,
            told_of["report"],
            run._repr_html_(),
        ):
            assert bytes_text(row.measured) in said

    def test_mfu_and_link_utilization(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        found, summary = ss.predict(run.job), run.summary()
        for name in ("mfu", "link_utilization"):
            predicted, measured = getattr(found, name), getattr(summary, name)
            # the work at peak rates is the same, so they differ as the step times do
            assert measured * summary.step_time_s == pytest.approx(predicted * found.step_time_s)
            assert run.stored_summary is not None
            assert getattr(run.stored_summary, name) == measured
            assert f"{predicted:.1%}" in repr(found)
            for said in (told_of["show"], told_of["card"]):
                assert figure_text(name, measured) in said

    def test_bytes_sent(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        row, sent = self.row(told_of, "bytes", "all collectives"), ss.predict(run.job).sent_bytes
        assert row.agrees
        assert row.measured == run.summary().bytes_per_step == int(sent.sum())
        for said in (
            told_of["show"],
            told_of["text"],
            told_of["twin"].screen.table.value,
            told_of["report"],
            run._repr_html_(),
        ):
            assert bytes_text(row.measured) in said

    def test_how_often_predictions_were_right(self, run: ss.Run, told_of: dict[str, Any]) -> None:
        inside = inside_text(ss.accuracy(run.path.parent).runs)
        assert re.match(
            r"1 step-time prediction checked so far on this machine, with an error of \d+%$", inside
        )
        assert told_of["accuracy"].startswith(inside)
        assert told_of["findings"][0].startswith(inside)
        assert told_of["report"].index(inside) < told_of["report"].index("<nav")
        assert told_of["twin"].screen.frame.about.startswith(inside)


def test_a_collective_and_a_bubble() -> None:
    calculator = CommunicationCalculator(workers=64, bandwidth=12.5, bandwidth_unit="GB/s")
    question = calculator.question
    ring = next(each for each in answers(question) if each.algorithm == "ring")
    told = communication.collective_time(
        op=question.op, algorithm="ring", num_bytes=question.num_bytes, workers=64, bandwidth=question.bandwidth,
        latency=question.latency,
    )  # fmt: skip
    assert ring.seconds == pytest.approx(float(told))
    assert duration_text(ring.seconds) in calculator.table.value
    explorer = PipelineExplorer(schedule="1f1b", stages=4, microbatches=8)
    bubble = ss.analytic.schedules.build("1f1b", stages=4, microbatches=8, virtual_stages=1).bubble_fraction
    assert explorer.timeline is not None
    assert explorer.timeline.bubble_fraction == pytest.approx(bubble)
    assert f"bubble {bubble:.1%}" in explorer._status.value


@pytest.fixture(scope="module")
def compressed() -> ss.Job:
    link = ss.Link(bandwidth="20 Mbit/s", latency="1 ms")
    return ss.Job(
        model="gpt-nano", data="python-source", strategy="ring", world_size=2, steps=8, batch=8, link=link
    )


def test_below_which_bandwidth_compression_pays_off(compressed: ss.Job) -> None:
    found = ss.compression_speedup(compressed)
    assert found.threshold is not None
    level = bit_rate_text(found.threshold.below)
    again = ss.compression_speedup(
        compressed.replace(link=ss.Link(bandwidth="1 Gbit/s", latency="1 ms"), steps=3)
    )
    assert again.threshold is not None
    assert again.threshold[1:] == pytest.approx(found.threshold[1:])
    assert found.at("5 Mbit/s").limit == found.limit
    with_int8 = ss.compression_speedup(compressed.replace(compression="int8"))
    assert with_int8.limit == found.limit
    calculator = CommunicationCalculator(job=compressed)
    calculator.tabs.selected_index = list(calculator.views).index("Compression")
    assert calculator._of_job is not None
    calculator._of_job.wait(60)
    lab = PayoffPanel()  # after a run in the Training Lab
    lab.begin()
    summary = SimpleNamespace(step_time_s=0.1, loss_mean=2.0)
    job = compressed.replace(compression="int8")
    lab.want(
        SimpleNamespace(
            id="it", job=job, cluster=None, is_alive=False, state="completed", stored_summary=summary
        )
    )  # type: ignore[arg-type]
    lab.wait(60)
    figure = figures.compression_speedup(found)
    named = [note.text for note in figure.layout.annotations]
    name = found.threshold.step.compression.label
    frame = found.to_frame().set_index("method")
    assert 8 * found.threshold.below == frame.loc[name, "pays_below_bit_per_s"]
    for said in (
        repr(found), found._repr_html_(), *(text for text in named if "pays off" in text),
        figures.caption(figures.compression_speedup, found), calculator.status.value,
        calculator.views["Compression"].figure.figure["layout"]["annotations"][-1]["text"], lab.words.value,
        lab.figure.figure["layout"]["annotations"][-1]["text"],
    ):  # fmt: skip
        assert f"pays off below {level}" in said.replace("<br>", " ")
    assert f"{name}, below {level}" in [line.name for line in figure.data]


@pytest.mark.slow
def test_a_finished_run_says_the_same_in_another_process_after_a_calibration_and_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ss.launch(
        ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, steps=8), root=tmp_path / "runs"
    ).wait(90)

    def told() -> list[Any]:
        command = [sys.executable, "-m", "shardscope.cli"]
        found = []
        for more in (
            ["compare", str(run.path)],
            ["show", str(run.path)],
            ["accuracy", "--root", str(run.path.parent)],
        ):
            said = subprocess.run([*command, *more, "--json"], capture_output=True, text=True, timeout=60)
            found.append(json.loads(said.stdout, parse_float=lambda text: float(f"{float(text):.9g}")))
        for row in found[0]["rows"]:
            row.pop("now", None)  # a second, named column
        return [found[0]["rows"], found[0]["conditions"], found[0]["reason"], *found[1:]]

    before = told()
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path / "cache"))
    shipped = HostCalibration.shipped()
    doubled = [
        row.model_copy(update={name: 2 * getattr(row, name) for name in ("value", "low", "high")})
        for row in shipped.constants
        if row.name != "link_efficiency"
    ]
    kept = [row for row in shipped.constants if row.name == "link_efficiency"]
    host_calibration.save(
        shipped.replace(
            machine=HostMachine.here(), constants=(*doubled, *kept), measured_at="2026-11-30 10:00"
        )
    )
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (path.stat().st_atime - 7 * 86400, path.stat().st_mtime - 7 * 86400))
    assert told() == before
