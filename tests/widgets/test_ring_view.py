"""The ring view without a browser."""

from __future__ import annotations

from shardscope_widgets import RingView, Trace
from widgets.fake_runs import fake_run, step_events


def test_it_tells_each_transfer_in_words():
    view = RingView(fake_run("ring", 4, steps=3, chunks=True), step=2)
    caption = view.ring["captions"][1]
    assert caption["title"] == "Scatter-reduce, round 2 of 3"
    assert "rank 1 sends chunk A (200 kB) to rank 2" in caption["transfers"]
    assert (view.step, view.steps) == (2, [1, 2, 3])


def test_choosing_another_step_shows_it():
    view = RingView(fake_run("ring", 2, steps=3, chunks=True))
    view.step = 3
    assert view.ring["step"] == 3


def test_without_chunks_it_says_how_to_get_them():
    view = RingView(fake_run("ring", 2, steps=3))
    assert view.ring.get("rounds") in (None, [])
    assert "trace_chunks=True" in view.empty


def test_new_steps_join_without_moving_what_is_shown():
    run = fake_run("ring", 2, steps=2, chunks=True)
    trace = Trace.read(run)
    view = RingView()
    view.show(trace)
    view.position = 1.5
    trace.feed(step_events("ring", 2, 3, chunks=True))
    view.show(trace)
    assert (view.steps, view.step, view.position) == ([1, 2, 3], 1, 1.5)


def test_its_code_is_a_string_so_that_it_can_be_collected():
    assert isinstance(RingView._esm, str)
