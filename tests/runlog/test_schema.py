"""Versions of a log: the present one is stated, older ones are read, newer ones are refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from conformance.damage import recorded_run
from conformance.runs import small_job
from shardscope.runlog.schema import SCHEMA
from shardscope.runlog.tail import Tail, first_events
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.record.processes import process_started
from shardscope.runtime.record.rundir import RunDir
from shardscope_widgets.trace import Trace

VERSION_0 = """
{"event":"process","t":10.0,"rank":0,"pid":41,"started":"boot/1"}
{"event":"start","t":10.1,"rank":0,"world_size":2,"device":"cpu","backend":"gloo","strategy":"ring","role":null,\
"model":"mlp","optimizer":"adamw","num_params":43402,"gradient_bytes":173608,"compression":"int8","codecs":"numba",\
"pid":41,"host":"vm"}
{"event":"resume","t":10.2,"rank":0,"step":4,"path":"step-4","samples":256,"remembered":true,"dropped":[],"notes":[]}
{"event":"step","t":10.3,"rank":0,"step":5,"loss":2.5,"samples":32,"tokens":null,"step_time_s":0.5,"lr":0.001,\
"grad_norm":null,"skipped":false,"loss_scale":null,"memory_bytes":300,"peak_memory_bytes":400,"traffic":{"broadcast":\
{"payload_bytes":64,"sent_bytes":32,"received_bytes":32,"messages":0,"calls":2,"sent_to":{}},"packet_all_gather":\
{"payload_bytes":44200,"sent_bytes":22100,"received_bytes":22100,"messages":1,"calls":1,"sent_to":{"1":22100}},\
"noise_scale":{"payload_bytes":16384,"sent_bytes":16384,"received_bytes":16384,"messages":0,"calls":1,"sent_to":{}}},\
"codec_s":0.25,"noise":{"small_square":7.5,"large_square":5.0,"small_batch":32,"large_batch":64},\
"spans":[["compute","forward",10.21,10.23,0],["communication","packet_all_gather",10.24,10.25,44200]]}
{"event":"memory","t":10.4,"rank":0,"step":5,"parameters":100,"gradients":90,"optimizer":80,"activations":70,\
"gathered":60,"buffers":50}
{"event":"eval","t":10.5,"rank":0,"step":5,"traffic":{"all_reduce":{"payload_bytes":32,"sent_bytes":16,\
"received_bytes":16,"messages":0,"calls":1,"sent_to":{}}},"loss":"inf","accuracy":0.25,"samples":355}
{"event":"end","t":10.6,"rank":0,"state":"completed","steps":5,"traffic":{}}
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A resumed run of two ranks and one step, as version 0 wrote it."""
    record = ss.Record(noise_scale=True)
    run = RunDir.create(small_job(steps=5, compression="int8", record=record), tmp_path)
    run.write_status("completed", pid=os.getpid(), process_started=process_started())
    for rank in (0, 1):
        run.rank_file(rank).write_text(VERSION_0.lstrip().replace('"rank":0', f'"rank":{rank}'))
    return run.path


def test_logs_of_version_0_are_read(old: Path) -> None:
    run = ss.Run.attach(old)
    summary = run.summary()
    assert (summary.steps, summary.last_step, summary.loss, summary.step_time_s) == (1, 5, 2.5, 0.5)
    assert (summary.bytes_per_step, summary.codec_s_per_step) == (2 * (32 + 22_100), 0.25)
    assert summary.observing_bytes == 2 * (16_384 + 16)
    assert (summary.test_loss, summary.test_accuracy) == (float("inf"), 0.25)
    assert (summary.process_bytes, summary.wall_s) == (400, pytest.approx(0.5))
    assert run.metrics()["sent_bytes"].tolist() == [summary.bytes_per_step]
    assert run.memory()["activations"].tolist() == [70, 70]
    assert len(run.timeline()) == 4
    assert run.noise_scale().steps == (5,)
    assert Trace.read(run).complete_span_steps() == [5]
    assert run.problems == ()


def test_a_new_log_states_its_version_once(tmp_path: Path) -> None:
    for attempt in (1, 2):  # a restarted rank appends
        with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
            events.emit("process", pid=attempt)
            events.emit("process", pid=attempt)
        told = [event.get("schema") for event in Tail(tmp_path).poll()]
        assert told == [SCHEMA, None] * attempt


def restate(path: Path, version: Any) -> None:
    log = path / "rank-1.jsonl"
    first, *rest = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps(json.loads(first) | {"schema": version}), *rest]) + "\n")


def test_a_newer_log_is_refused_in_one_sentence(runs_root: Path) -> None:
    recorded_run(runs_root)
    newer = recorded_run(runs_root, name="newer")
    attached = ss.Run.attach(newer)
    restate(newer, SCHEMA + 1)
    sentence = (
        f"rank-1.jsonl has events of schema version {SCHEMA + 1}, but this version of Shardscope reads only up to "
        f"{SCHEMA}; upgrade shardscope to read this run"
    )
    with pytest.raises(ss.errors.RunUnreadable) as refused:
        ss.Run.attach(newer)
    assert str(refused.value) == f"run {newer.name} cannot be read: {sentence}"
    for _ in range(2):  # no later poll returns the rest as if it were the whole
        with pytest.raises(ss.errors.RunUnreadable, match="upgrade shardscope"):
            attached.events()
    assert [run.name for run in ss.runs()] == ["good"]
    assert sentence[:40] in ss.runs().note


@pytest.mark.parametrize("version", [-1, True, "2", 1.5, None])
def test_a_version_that_is_no_number_is_damage(version: Any, runs_root: Path) -> None:
    path = recorded_run(runs_root)
    restate(path, version)
    run = ss.Run.attach(path)
    assert [event["rank"] for event in first_events(path)] == [0]
    assert run.problems == ("1 line of the run's logs cannot be read as events",)
