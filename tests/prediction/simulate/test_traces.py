"""Traces of simulated steps: what is written, and that a Chakra trace simulates to the step that it came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.analytic.communication import collective_time
from shardscope.prediction.simulate.chakra import COLLECTIVE, COMPUTE, TraceNode, read_nodes, write_nodes

LINK = ss.Link(bandwidth=1e9, latency=1e-4)


def job_of(strategy: str) -> ss.Job:
    return ss.Job(model="gpt-nano", data="python-source", strategy=strategy, world_size=4, batch=16)


def field(number: int, value: int | bytes) -> bytes:
    """Encode one field of a message by hand, as in the specification of the wire format."""

    def varint(rest: int) -> bytes:
        return bytes([rest]) if rest < 128 else bytes([rest % 128 + 128]) + varint(rest // 128)

    if isinstance(value, int):
        return varint(number * 8) + varint(value)
    return varint(number * 8 + 2) + varint(len(value)) + value


@pytest.mark.parametrize("strategy", ["ring", "pipeline", "zero-3", "parameter-server"])
def test_a_chakra_trace_takes_as_long_as_the_step_that_it_came_from(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    found = ss.simulate(job_of(strategy))
    found.export(tmp_path / "deep" / "step", format="chakra")
    graph = found.done.graph
    latency = max(fixed for fixed, link in zip(graph.fixed, graph.links[::2], strict=True) if link >= 0)
    link = ss.Link(bandwidth=graph.capacity[0], latency=latency)
    again = ss.simulate.chakra([tmp_path / "deep" / f"step.{rank}.et" for rank in range(4)], link)
    assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-3)
    assert again.links()["bytes"].sum() == found.links()["bytes"].sum()


def test_a_trace_of_another_tool_is_read_and_unknown_fields_are_skipped(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    attribute = field(1, b"comm_size") + field(9, 300)
    unknown = field(8, field(1, b"[1, 2]")) + field(11, b"")
    node = field(1, 7) + field(2, b"sum") + field(3, COLLECTIVE) + field(5, bytes([1, 2])) + field(7, 400)
    node += unknown + field(10, attribute) + field(10, field(1, b"comm_type") + field(9, 0))
    path = tmp_path / "other.et"
    path.write_bytes(b"".join(bytes([len(part)]) + part for part in (field(1, b"0.0.4"), node)))
    (read,) = read_nodes(path)
    assert read == TraceNode(7, "sum", COLLECTIVE, (1, 2), 0, 400, {"comm_size": 300, "comm_type": 0})


@pytest.mark.parametrize(("number", "op"), [(0, "all_reduce"), (2, "all_gather"), (7, "reduce_scatter")])
def test_collectives_of_a_trace_run_as_rings_after_the_slowest_rank(
    number: int, op: str, tmp_path: Path
) -> None:
    pytest.importorskip("google.protobuf")
    paths = [tmp_path / f"t.{rank}.et" for rank in range(4)]
    for rank, path in enumerate(paths):
        about = {"comm_type": number, "comm_size": 4_000_000}
        work = TraceNode(1, "work", COMPUTE, duration_us=1000 * (rank + 1))
        write_nodes(path, [work, TraceNode(2, op, COLLECTIVE, (1,), attributes=about)])
    found = ss.simulate.chakra(paths, LINK)
    asked = {
        "op": op,
        "algorithm": "ring",
        "num_bytes": 4_000_000,
        "workers": 4,
        "bandwidth": 1e9,
        "latency": 1e-4,
    }
    assert found.step_time_s == pytest.approx(4e-3 + float(collective_time(**asked)), rel=1e-6)
    slow = ss.simulate.chakra(paths, LINK, stragglers={0: 10.0})
    assert slow.step_time_s == pytest.approx(found.step_time_s + 6e-3, rel=1e-6)


def test_traces_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    path = tmp_path / "bad.et"
    write_nodes(path, [TraceNode(1, "late", COMPUTE, (5,))])
    with pytest.raises(ss.SpecError, match="depends on node 5"):
        ss.simulate.chakra([path], LINK)
    write_nodes(path, [TraceNode(1, "sent", 5, attributes={"comm_dst": 1})])
    with pytest.raises(ss.SpecError, match="no rank receives it"):
        ss.simulate.chakra([path], LINK)
    path.write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff no trace")
    with pytest.raises(ss.SpecError, match="is not a Chakra trace"):
        ss.simulate.chakra([path], LINK)
    with pytest.raises(ss.SpecError, match="give a list of files"):
        ss.simulate.chakra([], LINK)


def test_without_protobuf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.proto", None)
    with pytest.raises(ss.SpecError, match="pip install protobuf"):
        ss.simulate(job_of("ring")).export(tmp_path / "step", format="chakra")


def test_a_step_with_whole_collectives_has_no_chakra_trace(tmp_path: Path) -> None:
    with pytest.raises(ss.SpecError, match="lists its messages"):
        ss.simulate(job_of("all-reduce")).export(tmp_path / "step", format="chakra")


def test_a_chrome_trace_has_every_event(tmp_path: Path) -> None:
    found = ss.simulate(job_of("pipeline"))
    path = found.export(tmp_path / "step.json")
    events = json.loads(Path(path).read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [e for e in events if e["ph"] == "X" and lanes[e["pid"], e["tid"]] != "steps"]
    assert len(drawn) == len(found.timeline.events)
    with pytest.raises(ss.SpecError, match="format='vcd' is not"):
        found.export(tmp_path / "x", format="vcd")
