"""A lab that opens after a restart of the kernel shows the names and looks that the lab before it gave the runs."""

from __future__ import annotations

import pytest

from shardscope.runtime.record.about import read_about
from shardscope_widgets.training_lab._runbook import RunBook
from widgets.fake_runs import fake_run


@pytest.fixture
def new_run(runtime, tmp_path):
    def new(run_id, strategy="ring", **changes):
        folder = tmp_path / run_id
        folder.mkdir()
        run = fake_run(strategy, 2, steps=3, run_id=run_id, **changes)
        run.path = folder
        runtime.known.append(run)
        return run

    return new


def shown_by(book, *run_ids):
    book.find()
    book.name(run_ids or [*book.entries])
    return {run_id: (entry.trace.label, entry.trace.look) for run_id, entry in book.entries.items()}


def test_names_and_looks_are_those_of_the_lab_before(new_run):
    first = RunBook()
    new_run("a")
    shown_by(first)
    new_run("b", "zero-3")
    shown_by(first)
    new_run("c")
    new_run("d")
    before = shown_by(first)
    assert before["a"][0] == "ring-gpt-nano"  # it had no other run beside it
    assert shown_by(RunBook()) == before
    assert shown_by(RunBook(), "d", "a") == before


def test_a_name_that_another_run_has_is_not_taken(new_run):
    new_run("a")
    new_run("b", "zero-3")
    shown_by(RunBook(), "a")
    shown_by(RunBook(), "b")
    names = [name for name, _ in shown_by(RunBook()).values()]
    assert len({*names}) == 2


def test_a_folder_that_cannot_be_written_is_no_problem(new_run, runtime):
    new_run("a")
    runtime.known[0].path = runtime.known[0].path / "gone"
    assert shown_by(RunBook())["a"][0] == "ring-gpt-nano"


def test_only_a_colour_is_taken_from_a_folder(new_run, runtime):
    new_run("a")
    (runtime.known[0].path / "about.json").write_text('{"look": "\\"><img/src=x/onerror=alert(1)> 3"}')
    assert shown_by(RunBook())["a"][1].colour.startswith("#")


def test_what_a_person_wrote_about_the_run_stays(new_run, runtime):
    new_run("a")
    path = runtime.known[0].path
    (path / "about.json").write_text('{"note": "mine"}')
    label, look = shown_by(RunBook())["a"]
    about = read_about(path)
    assert (about.note, about.label, about.look) == ("mine", label, f"{look.colour} {look.place}")


def test_another_run_of_a_job_has_its_name_with_a_number_and_a_change_is_named_by_what_it_changes(new_run):
    book = RunBook()
    for turn in range(2):
        first = new_run(f"a{turn}", "pipeline")
        shown_by(book)
        book.entries[first.id].trace.split = (4, 2)  # as its ranks measured
        split = first.job.strategy.replace(split=(4, 2))
        new_run(f"b{turn}", split, batch={"global_batch": 5040, "micro_batch": 5}).baseline = first.id
        shown_by(book)
    new_run("c", "zero-3")
    names = [name for name, _ in shown_by(book).values()]
    assert names == [
        "pipeline-1f1b-gpt-nano", "micro-batch 5", "pipeline-1f1b-gpt-nano (2)", "micro-batch 5 (2)", "zero-3",
    ]  # fmt: skip
