"""The recorded step of a real run: every message with its receiver, adding up to what the run counted and predicted."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import SHORT_TEXT


def recorded(strategy: str, **settings: object) -> tuple[ss.Run, object]:
    job = ss.Job(
        model="gpt-nano", data=SHORT_TEXT, strategy=strategy, world_size=3 if strategy == "ring" else 4, steps=4,
        batch=ss.Batch(24), **settings,
    )  # fmt: skip
    run = ss.launch(job).wait(120)
    return run, run.step_events()


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "tree", "parameter-server", "pipeline", "zero-3"])
def test_its_messages_add_up_to_the_runs_bytes_and_to_the_predicted_ones(strategy: str) -> None:
    run, step = recorded(strategy)
    assert step is not None
    counted = [0] * run.job.world_size
    for event in [*run.events("step"), *run.events("traffic")]:
        if event["step"] == step.step == 3:
            counted[event["rank"]] += sum(row["sent_bytes"] for row in event["traffic"].values())
    assert step.sent_bytes == counted == ss.predict(run.job).sent_bytes.tolist()
    predicted = ss.simulate.step_events(run.job)
    pairs = {(m.rank, m.peer, m.kind) for m in step.messages}
    assert pairs == {(m.rank, m.peer, m.kind) for m in predicted.messages}
    assert step.arrangement == predicted.arrangement


def test_messages_arrive_after_they_are_sent_and_memory_changes_during_the_step() -> None:
    run, step = recorded("ring")
    assert len(step.messages) == 12
    assert all(message.end_s > message.start_s for message in step.messages)
    assert {message.item for message in step.messages} == {f"chunk {k} of the gradients" for k in range(3)}
    activations = {point.held[3] for point in step.memory if point.rank == 0}
    assert len(activations) > 5
    longest = max(event["step_time_s"] for event in run.events("step") if event["step"] == 3)
    assert step.step_time_s >= longest


@pytest.mark.slow
def test_no_messages_are_recorded_if_the_job_asks_for_none() -> None:
    run, step = recorded("ring", record=ss.Record(messages_first=0))
    assert not run.events("messages")
    assert not step.messages
    assert step.sent_bytes == ss.predict(run.job).sent_bytes.tolist()
