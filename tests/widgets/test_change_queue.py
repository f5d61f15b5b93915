"""A change of a run that waits for its end."""

from __future__ import annotations

from typing import Any

import pytest

from shardscope_widgets.training_lab._queue import ChangeQueue
from shardscope_widgets.training_lab._runbook import RunBook
from widgets.fake_runs import fake_run


@pytest.mark.parametrize(("state", "starts"), [("completed", True), ("stopped", True), ("failed", False)])
@pytest.mark.parametrize("is_queued_first", [True, False])
def test_after_the_stop_button_a_change_starts_unless_the_run_fails(
    runtime: Any, state: str, *, starts: bool, is_queued_first: bool
) -> None:
    run = fake_run("ring", 2, steps=3)
    run.state = "running"
    runtime.known.append(run)
    book, started = RunBook(), []
    book.find()
    queue = ChangeQueue(book, lambda _run, change, _waited: started.append(change))
    presses = [lambda: queue.press(run, {"seed": 1}, is_busy=False), lambda: queue.expect_stop(run)]
    for press in presses if is_queued_first else reversed(presses):
        press()
    run.state = state
    book.poll([run.id])
    queue.update(is_busy=False)
    queue.update(is_busy=False)
    assert started == [{"seed": 1}] * starts
    assert bool(queue.note) != starts
