"""The events of a predicted step: they add up to the prediction, for every strategy."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.analytic.communication.plan import Move, ring_rounds, tree_rounds
from shardscope.runlog.schema import MEMORY_KINDS

STRATEGIES = (
    "ring",
    "ring:2",
    "tree",
    "parameter-server",
    "pipeline",
    "zero-1",
    "zero-2",
    "zero-3",
    "hierarchical",
)
SETTINGS = (
    {"strategy": ss.ParameterServer(servers=2, dedicated=True), "batch": 6},
    {"strategy": ss.Zero3(replicas=2), "clip_norm": 1.0},
    {"strategy": "zero-3", "batch": ss.Batch(16, micro_batch=2)},
    {"strategy": "zero-2:backend", "batch": ss.Batch(16, micro_batch=2)},
    {"strategy": "ring", "compression": "qsgd"},
    {"strategy": "zero-1", "compression": "int8"},
    {"strategy": "tree", "batch": ss.Batch(16, micro_batch=2), "clip_norm": 1.0},
    {"strategy": "pipeline:interleaved", "world_size": 2, "batch": ss.Batch(16, micro_batch=2)},
    {"strategy": "pipeline:zero-bubble", "world_size": 2, "batch": ss.Batch(16, micro_batch=2)},
    {"strategy": "all-reduce"},
)


def job_of(**settings: object) -> ss.Job:
    return ss.Job(**{"model": "gpt-nano", "data": "python-source", "world_size": 4, "batch": 16, **settings})


def sent_by_collective(step: object) -> dict[str, list[int]]:
    sent: dict[str, list[int]] = {}
    for event in step.events:
        if event.num_bytes:
            sent.setdefault(event.kind, [0] * step.world_size)[event.rank] += event.num_bytes
    return sent


def agrees(job: ss.Job, cluster: ss.Cluster | None = None) -> None:
    step, prediction = ss.simulate.step_events(job, cluster), ss.predict(job, cluster)
    predicted = {name: sent.bytes.tolist() for name, sent in prediction.traffic.items() if sent.bytes.any()}
    assert sent_by_collective(step) == predicted
    assert step.step_time_s == prediction.step_time_s
    last = max(event.end_s for event in step.events)
    assert last <= step.step_time_s * (1 + 1e-9)
    assert all(0 <= event.start_s <= event.end_s for event in step.events)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_and_time_are_those_of_the_prediction(strategy: str) -> None:
    agrees(job_of(strategy=strategy))
    agrees(job_of(strategy=strategy), ss.Cluster.of("h100", per_node=4))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings["strategy"])[:40])
def test_bytes_and_time_agree_with_other_settings_too(settings: dict[str, object]) -> None:
    agrees(job_of(**settings))


@pytest.mark.parametrize("strategy", ["ring", "tree", "parameter-server", "zero-3"])
def test_a_step_without_idle_parts_ends_exactly_with_its_last_event(strategy: str) -> None:
    step = ss.simulate.step_events(job_of(strategy=strategy))
    assert max(event.end_s for event in step.events) == pytest.approx(step.step_time_s, rel=1e-9)


@pytest.mark.parametrize("strategy", ["ring", "zero-3", "pipeline"])
def test_the_peak_of_each_type_of_memory_is_the_predicted_one(strategy: str) -> None:
    job = job_of(strategy=strategy)
    step, kinds = ss.simulate.step_events(job), ss.predict(job).kinds
    for place, kind in enumerate(MEMORY_KINDS):
        for rank in range(4):
            held = max(point.held[place] for point in step.memory if point.rank == rank)
            assert kind not in kinds or held == pytest.approx(kinds[kind][rank], abs=1)


def test_a_ring_moves_every_chunk_to_the_next_rank_in_six_rounds() -> None:
    step = ss.simulate.step_events(job_of(strategy="ring"))
    assert len({message.phase for message in step.messages}) == 6
    assert all(message.peer == (message.rank + 1) % 4 for message in step.messages)
    first = min(step.messages, key=lambda message: (message.start_s, message.rank))
    assert (first.rank, first.peer, first.item) == (0, 1, "chunk 3 of the gradients")


def test_rounds_of_a_ring_and_a_tree_follow_the_papers() -> None:
    assert ring_rounds("all_reduce", 4, 4, 2)[0].moves == (Move(0, 1, 8, "chunk 1"), Move(1, 0, 8, "chunk 0"))
    levels = [[(move.source, move.target) for move in each.moves] for each in tree_rounds(8, 4)]
    assert levels == [[(3, 1)], [(1, 0), (2, 0)], [(0, 1), (0, 2)], [(1, 3)]]


def test_sixty_four_devices_can_be_drawn_and_more_are_refused() -> None:
    cluster = ss.Cluster.of("h100", nodes=8, per_node=8)
    agrees(job_of(strategy="zero-3", world_size=64, batch=64), cluster)
    with pytest.raises(ss.SpecError, match="use at most 64"):
        ss.simulate.step_events(job_of(strategy="ring", world_size=128, batch=128))


def test_gossip_sends_the_parameters_to_both_neighbours() -> None:
    job = job_of(strategy="gossip")
    step = ss.simulate.step_events(job)
    peers = {(message.rank, message.peer) for message in step.messages}
    assert peers == {(rank, (rank + way) % 4) for rank in range(4) for way in (-1, 1)}
    assert {message.item for message in step.messages} == {"parameters"}
    assert sum(message.num_bytes for message in step.messages) == ss.predict(job).sent_bytes.sum()


def test_a_strategy_that_lists_no_messages_says_so() -> None:
    with pytest.raises(ss.SpecError, match="does not list its messages"):
        ss.simulate.step_events(job_of(strategy=Unlisted()))


class Unlisted(ss.Ring):
    """A ring whose messages are unknown."""

    name = "unlisted"

    def plan(self, step: Any) -> None:
        return None
