"""The sentences of a report: computed from runs with known losses, speeds and memory."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shardscope.spec import Link, Optimizer
from shardscope_widgets.figures._agreement import AgreementRow, agreement_info, draw_agreement
from shardscope_widgets.figures._step_parts import StepPartsRow, draw_step_parts, step_parts_info
from shardscope_widgets.report import findings
from shardscope_widgets.report._settings import machine_rows, settings_rows
from shardscope_widgets.report.entries import Group, groups_of
from widgets.fake_runs import FakeRun, fake_run, memory_events


def run(
    strategy: str, ranks: int = 4, *, apart: float = 0.0, times: float = 1.0, run_id: str = "", **job: Any
) -> FakeRun:
    """A run whose losses differ from 3 exp(-step / 20) by a known share, and whose steps take so many times 90 ms."""
    made = fake_run(strategy, ranks, steps=20, run_id=run_id or strategy, **{"batch": 48, **job})
    for event in made.all_events:
        if event["event"] == "step":
            event["loss"] = 3 * math.exp(-event["step"] / 20) * (1 + apart)
            event["step_time_s"] = 0.09 * times
            event["samples"], event["tokens"] = 64 // made.job.world_size, 4096 // made.job.world_size
    return made


def group(*runs: FakeRun) -> Group:
    ((only,), silent) = groups_of(runs)
    assert silent == []
    return only


class TestAgreement:
    def text(self, *runs: FakeRun) -> str:
        return findings.agreement_text(group(*runs).entries)

    def test_all_agree(self) -> None:
        said = self.text(run("single"), run("ring", apart=3e-7), run("tree", apart=1e-7))
        assert said == (
            "Both strategies learned the same as one process: their losses agree to within rounding (3e-07)."
        )

    def test_one_that_differs_by_design_is_the_exception_and_says_why(self) -> None:
        said = self.text(run("single"), run("ring"), run("tree"), run("gossip", apart=0.01))
        assert said == (
            "Two of three strategies learned the same as one process. By design, gossip differs: each rank "
            "updates its own parameters and averages them only with its neighbours'."
        )

    def test_one_that_should_agree_is_named(self) -> None:
        said = self.text(run("single"), run("ring"), run("tree", apart=1e-3))
        assert "tree should agree but does not: ss.check(job) finds out where." in said

    @pytest.mark.parametrize(
        "other", [{"batch": 24}, {"lr_schedule": "cosine"}, {"optimizer": Optimizer("adamw", lr=0.1)}]
    )
    def test_only_a_single_process_that_should_learn_the_same_counts(self, other: dict[str, Any]) -> None:
        assert self.text(run("single", **other), run("ring", apart=1.0)) == ""

    def test_the_section_gives_the_numbers(self) -> None:
        odd = run("tree", apart=0.01)
        for event in odd.all_events:
            if event.get("step") == 20 and "loss" in event:
                event["loss"] *= 2
        entries = group(run("single"), run("ring", apart=3e-7), odd).entries
        assert findings.differences_text(entries) == (
            "Losses differ from those of one process: those of tree most in step 20, 2.2293 instead of 1.1036; those "
            "of all others by at most 3e-07."
        )

    def test_a_run_that_learns_something_else_is_not_the_fastest(self) -> None:
        said = findings.speed_text(
            group(run("single"), run("ring", times=0.5), run("gossip", apart=0.01, times=0.1))
        )
        assert "ring is the fastest" in said

    def test_a_shorter_run_has_neither_the_lowest_nor_the_highest_loss(self) -> None:
        short = run("pipeline", 2, apart=0.9)
        short.all_events = [event for event in short.all_events if event.get("step", 0) <= 12]
        said = findings.lowest_loss_text(group(run("ring"), run("tree", apart=0.5), short))
        assert "pipeline" not in said
        assert said.endswith("tree.")

    def test_without_a_single_process_the_lowest_loss_is_named(self) -> None:
        said = findings.headline([group(run("ring"), run("tree", apart=0.5))])
        assert said[0].startswith(
            "On gpt-nano on python-source, ring ends at the lowest loss, 1.1036 (step 20)"
        )


class TestSpeed:
    def test_a_run_that_beats_one_process(self) -> None:
        said = findings.speed_text(group(run("single"), run("ring", times=0.5), run("tree", times=0.8)))
        assert said == (
            "Training gpt-nano on python-source, ring is the fastest: 4 ranks are 2 times as fast as one process."
        )

    def test_ranks_that_share_cores_are_the_reason_why_none_is_faster(self) -> None:
        slow = run("ring", times=2)
        slow.provenance = SimpleNamespace(machine={"cores": 2.0}, versions={}, commit=None)
        assert findings.speed_text(group(run("single"), slow)) == (
            "Training gpt-nano on python-source, ring does not beat one process here, because 4 ranks share 2 cores: "
            "it reaches 50 % of its speed."
        )

    def test_a_step_is_divided_into_computing_and_waiting(self) -> None:
        said = findings.step_text(group(run("single"), run("ring")))
        assert said.startswith("In a step of ring, a rank computes for ")
        assert "; one process computes for " in said


def test_the_run_that_needs_least_memory_is_named_with_what_it_saves() -> None:
    one, ring, zero = run("single"), run("ring"), run("zero-1")
    one.all_events += memory_events(1)
    ring.all_events += memory_events(4)
    zero.all_events += memory_events(4, shards=4)
    found = group(one, ring, zero)
    assert findings.memory_text(found) == (
        "zero-1 needs the least memory for gpt-nano on python-source: its peak memory per rank is 2.63 MB, instead "
        "of 3.6 MB on one process."
    )
    assert findings.saving_text(found) == (
        "Most of the memory that zero-1 saves is optimizer state: 400 kB instead of 1.6 MB."
    )


def test_settings_that_differ_name_their_runs() -> None:
    one = run("single", precision="fp32")
    two = run("ring", precision="bf16-mixed", link=Link(bandwidth="1 Gbit/s", latency="1 ms"))
    rows = dict(settings_rows([group(one, two)]))
    assert rows["precision"] == "fp32; bf16-mixed (ring)"
    assert rows["link"] == "this machine's own; 1 Gbit/s, 1 ms (ring)"
    assert rows["ranks"] == "1; 4 (ring)"
    assert rows["optimizer"] == "adamw, learning rate 0.001"


def test_the_machine_and_versions_are_those_of_the_runs() -> None:
    one = run("single")
    machine = {"cpu": "a CPU", "cores": 2.0, "memory_bytes": 8_000_000_000, "gpus": [], "platform": "Linux"}
    one.provenance = SimpleNamespace(
        machine=machine, versions={"torch": "2.13"}, commit="0123456789abc", is_dirty=True
    )
    assert machine_rows(group(one).entries) == [
        ("machine", "a CPU, 2 cores, 8 GB of memory, no GPU, Linux"),
        ("versions", "torch 2.13"),
        ("commit", "0123456789 with uncommitted changes"),
    ]


@pytest.mark.parametrize("runs", [[], [run("ring")]])
def test_few_runs_need_no_headline(runs: list[FakeRun]) -> None:
    assert findings.headline(groups_of(runs)[0]) == []


def test_bars_of_parts_are_in_the_order_of_the_step_times_which_are_marked() -> None:
    rows = [StepPartsRow("slow", {"forward": 1.0}, 3.0), StepPartsRow("fast", {"forward": 2.0}, 2.5)]
    drawn = draw_step_parts(step_parts_info(rows, None))
    assert (drawn.data[0].y, drawn.data[-1].x) == (("fast", "slow"), (2.5, 3.0))
    rest = next(each for each in drawn.data if each.name == "rest")
    assert rest.x == (0.5, 2.0)  # so that bars end at the marks


def test_a_run_that_learns_something_else_shows_both_losses_and_no_percentage_above_100() -> None:
    rows = [
        AgreementRow("gossip", "gossip", 1.41, False, (0.092, 0.03817)),
        AgreementRow("ring", "ring", 2e-7, True, (0.5, 0.5)),
    ]
    figure = draw_agreement(agreement_info(rows, 1e-5))
    assert list(figure.data[0].text) == [" 2e-07 ", " 0.0920 vs 0.0382 "]
