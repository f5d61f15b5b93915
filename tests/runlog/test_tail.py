"""Events as they are read: each rank's in its own order, and a long log without holding it in memory."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.events import step_event, traffic
from shardscope.runlog import tail
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.tail import Tail
from shardscope.runtime.record.rundir import RunDir


def write(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def steps_of(rank: int, times: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [step_event(i, rank, t=t, traffic=traffic(64), **fields) for i, t in enumerate(times, 1)]


def test_events_of_a_rank_keep_their_order_when_its_clock_is_set_back(tmp_path: Path) -> None:
    write(tmp_path, 0, steps_of(0, [1, 2, 3, 4, 3.5, 4.5, 5.5, 6.5]))
    write(tmp_path, 1, steps_of(1, [1.1, 2.1, 3.1, 4.1, 5.1, 6.1, 7.1, 8.1]))
    log = RunLog(world_size=2)
    log.feed(Tail(tmp_path).poll())
    assert [step.number for step in log.steps] == [1, 2, 3, 4, 5, 6, 7, 8]


def restarted(folder: Path, rank: int, times: list[float]) -> None:
    """Write a log of nine steps and, after a restart from step 6, of five more, at these times."""
    restart = {
        "event": "restart",
        "rank": 0,
        "t": times[9],
        "step": 6,
        "attempt": 1,
        "cause": "",
        "source": "disk",
    }
    start = {"event": "start", "rank": rank, "t": times[10], "strategy": "ring"}
    after = [step_event(step, rank, t=t, traffic=traffic(64)) for step, t in enumerate(times[11:16], 7)]
    write(folder, rank, [*steps_of(rank, times[:9]), *([restart] * (rank == 0)), start, *after])


def test_a_restart_keeps_the_steps_before_it_when_all_clocks_are_set_back(tmp_path: Path) -> None:
    times = [1000.0 + step - 900.0 * (step > 3) for step in range(20)]
    for rank, later in ((0, 0.1), (1, 0.0)):  # the rank that was ahead must not have all its events last
        restarted(tmp_path, rank, [t + later for t in times])
    log = RunLog(world_size=2)
    log.feed(Tail(tmp_path).poll())
    assert [step.number for step in log.steps] == [*range(1, 12)]


@pytest.mark.parametrize("writer", [0, 1])
def test_a_restart_keeps_the_steps_before_it_when_a_clock_has_been_put_right(
    tmp_path: Path, writer: int
) -> None:
    times = [1000.0 + step for step in range(20)]
    for rank in (0, 1):  # only one of them writes while the clock is set back
        restarted(
            tmp_path, rank, [t - 900.0 * (rank == writer and step in (4, 5)) for step, t in enumerate(times)]
        )
    log = RunLog(world_size=2)
    log.feed(Tail(tmp_path).poll())
    assert [step.number for step in log.steps] == [*range(1, 12)]


def test_a_log_is_read_in_batches_that_come_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_BLOCK", 2000)
    for rank in (0, 1):
        write(tmp_path, rank, steps_of(rank, [float(t) for t in range(1, 200)]))
    whole, log, reader = RunLog(world_size=2), RunLog(world_size=2), Tail(tmp_path)
    whole.feed(Tail(tmp_path).poll())
    sizes = []
    for batch in reader.batches():
        log.feed(batch)
        sizes.append(len(batch))
    assert repr(list(log.steps)) == repr(list(whole.steps))  # NaN is not equal to itself
    assert len(log.steps) == 199
    assert max(sizes) < 40
    assert list(reader.batches()) == [[]]


def test_a_log_with_short_lines_does_not_get_ahead_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_BLOCK", 2000)
    spans = [["compute", "forward", 0.0, 0.1, 0]] * 20
    write(tmp_path, 0, steps_of(0, [float(t) for t in range(1, 200)]))
    write(tmp_path, 1, steps_of(1, [float(t) for t in range(1, 200)], spans=spans))
    log, most = RunLog(world_size=2), 0
    for batch in Tail(tmp_path).batches():
        assert [event["t"] for event in batch] == sorted(event["t"] for event in batch)
        log.feed(batch)
        most = max(most, len(log._open))
    assert len(log.steps) == 199
    assert most <= 1


def test_an_interrupted_reading_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunDir.create(ss.Job(model="mlp", data="digits", world_size=1, strategy="single"), tmp_path)
    write(folder.path, 0, steps_of(0, [float(t) for t in range(1, 50)]))
    run = ss.Run(folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunLog, "_on_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run.reduced()
    assert len(run.reduced().steps) == 49


def test_a_run_can_be_pickled(tmp_path: Path) -> None:
    folder = RunDir.create(ss.Job(model="mlp", data="digits", world_size=1, strategy="single"), tmp_path)
    write(folder.path, 0, steps_of(0, [1.0, 2.0]))
    run = ss.Run(folder)
    assert len(run.metrics()) == 2
    assert len(pickle.loads(pickle.dumps(run)).metrics()) == 2


def test_a_line_that_is_longer_than_a_batch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "_BLOCK", 100)
    write(tmp_path, 0, steps_of(0, [1.0, 2.0, 3.0]))
    assert [event["step"] for event in Tail(tmp_path).poll()] == [1, 2, 3]


def test_threads_that_read_one_run_count_nothing_twice(tmp_path: Path) -> None:
    folder = RunDir.create(ss.Job(model="mlp", data="digits", world_size=1, strategy="single"), tmp_path)
    write(folder.path, 0, steps_of(0, [float(t) for t in range(1, 400)]))
    run = ss.Run(folder)
    threads = [threading.Thread(target=lambda: (run.events(), run.metrics())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run.events()) == len(run.reduced().steps) == 399
    assert sum(run.reduced().collectives.values()) == 399 * 64
