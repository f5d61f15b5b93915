"""Traces of simulated steps: what is written, and that a Chakra trace simulates to the step that it came from."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.analytic.communication import collective_time
from shardscope.runlog.chakra import (
    COLLECTIVE,
    COMPUTE,
    RECEIVE,
    SEND,
    TraceNode,
    read_traces,
    write_nodes,
)
from shardscope.simulator import Simulation

LINK = ss.Link(bandwidth=1e9, latency=1e-4)
INSTANT = ss.Link(bandwidth=1e9, latency=0.0)
SECOND = 1_000_000
"""Microseconds."""


def job_of(strategy: str) -> ss.Job:
    return ss.Job(model="gpt-nano", data="python-source", strategy=strategy, world_size=4, batch=16)


def work(id_: int, seconds: float, after: tuple[int, ...] = (), **attributes: int) -> TraceNode:
    return TraceNode(id_, "work", COMPUTE, after, 0, round(seconds * SECOND), attributes)


def message(
    id_: int, type_: int, after: tuple[int, ...] = (), *, tag: int = 0, seconds: float = 1.0
) -> TraceNode:
    """Return a send or a receive of a message from rank 0 to rank 1, with its time on the link `INSTANT`."""
    size = round(seconds * INSTANT.bandwidth)
    about = {"comm_src": 0, "comm_dst": 1, "comm_tag": tag, "comm_size": size}
    return TraceNode(id_, "message", type_, after, attributes=about)


def replay(folder: Path, *traces: list[TraceNode]) -> Simulation:
    pytest.importorskip("google.protobuf")
    paths = [folder / f"replay.{rank}.et" for rank in range(len(traces))]
    for path, nodes in zip(paths, traces, strict=True):
        write_nodes(path, nodes)
    return ss.simulate.chakra(paths, INSTANT)


def varint(rest: int) -> bytes:
    return bytes([rest]) if rest < 128 else bytes([rest % 128 + 128]) + varint(rest // 128)


def field(number: int, value: int | bytes) -> bytes:
    """Encode one field of a message by hand, as in the specification of the wire format."""
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
    rounded = 5e-7 * len(graph.fixed)  # durations in traces are whole microseconds
    # Messages of a pipeline's other kinds, and all but the last that a server sends, take less time than the link's
    # latency, which is one for all.
    bound = {"pipeline": 3e-3, "parameter-server": 5e-2}.get(strategy, 1e-4)
    assert again.step_time_s == pytest.approx(found.step_time_s, rel=bound, abs=rounded)
    assert again.links()["bytes"].sum() == found.links()["bytes"].sum()


def test_a_trace_of_another_tool_is_read_and_unknown_fields_are_skipped(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    attribute = field(1, b"comm_size") + field(9, 300)
    unknown = field(8, field(1, b"[1, 2]")) + field(11, b"")
    node = field(1, 7) + field(2, b"sum") + field(3, COLLECTIVE) + field(5, bytes([1, 2])) + field(7, 400)
    node += unknown + field(10, attribute) + field(10, field(1, b"comm_type") + field(9, 0))
    path = tmp_path / "other.et"
    path.write_bytes(b"".join(bytes([len(part)]) + part for part in (field(1, b"0.0.4"), node)))
    ((read,),) = read_traces([path])
    assert read == TraceNode(7, "sum", COLLECTIVE, (1, 2), 0, 400, {"comm_size": 300, "comm_type": 0})


def test_attributes_of_every_type_are_read(tmp_path: Path) -> None:
    """Chakra's schema leaves it to the writer whether a size is an int64, a uint32 or a fixed64, for example."""
    pytest.importorskip("google.protobuf")
    zigzag = 2 * 300
    fields = {
        "int32": field(7, 300), "int64": field(9, 300), "uint32": field(11, 300), "uint64": field(13, 300),
        "sint32": field(15, zigzag), "sint64": field(17, zigzag),
        "fixed32": bytes([19 * 8 % 128 + 5 + 128, 1]) + (300).to_bytes(4, "little"),
        "fixed64": bytes([21 * 8 % 128 + 1 + 128, 1]) + (300).to_bytes(8, "little"),
        "double": bytes([3 * 8 + 1]) + struct.pack("<d", 300.0),
        "list": field(28, field(1, 1)),
    }  # fmt: skip
    node = field(1, 7) + field(3, SEND)
    for name, value in fields.items():
        node += field(10, field(1, name.encode()) + value)
    path = tmp_path / "other.et"
    path.write_bytes(bytes([7]) + field(1, b"0.0.4") + varint(len(node)) + node)
    ((read,),) = read_traces([path])
    assert read.attributes == {**dict.fromkeys(fields, 300), "list": 0}


@pytest.mark.parametrize(("number", "op"), [(0, "all_reduce"), (2, "all_gather"), (7, "reduce_scatter")])
def test_collectives_of_a_trace_run_as_rings_after_the_slowest_rank(
    number: int, op: str, tmp_path: Path
) -> None:
    """The size in a trace is that of a rank's input, which is a quarter of the tensor in an all-gather."""
    pytest.importorskip("google.protobuf")
    paths = [tmp_path / f"t.{rank}.et" for rank in range(4)]
    for rank, path in enumerate(paths):
        about = {"comm_type": number, "comm_size": 1_000_000 if op == "all_gather" else 4_000_000}
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


@pytest.mark.parametrize("op", [0, 2, 6, 9])
def test_ranks_that_do_the_same_are_simulated_as_one(op: int, tmp_path: Path) -> None:
    """A factor of 1 changes no time, but lets each rank be simulated on its own."""
    pytest.importorskip("google.protobuf")
    paths = [tmp_path / f"t.{rank}.et" for rank in range(6)]
    for rank, path in enumerate(paths):  # numbers of nodes may start anywhere
        work = TraceNode(rank + 1, "work", COMPUTE, duration_us=500)
        write_nodes(path, [work, collective(rank + 2, 6_000, op)._replace(after=(rank + 1,))])
    one, each = (ss.simulate.chakra(paths, LINK, stragglers=factors) for factors in ({}, {0: 1.0}))
    assert (len(one.lane_ranks), len(each.lane_ranks)) == (1, 6)
    assert one.merged[1:] == ("All ranks do the same, so one is simulated.",)
    assert one.step_time_s == pytest.approx(each.step_time_s, rel=1e-12)
    assert one.time.to_dict() == each.time.to_dict()
    assert one.collectives().to_dict() == each.collectives().to_dict()
    drawn = [
        [(e.rank, e.kind, round(e.start_s, 9), e.peer, e.num_bytes) for e in f.timeline.events]
        for f in (one, each)
    ]
    assert sorted(drawn[0], key=str) == sorted(drawn[1], key=str)


def test_a_ring_with_chunks_of_two_sizes_is_simulated_rank_by_rank(tmp_path: Path) -> None:
    found = replay(tmp_path, *[[collective(1, 8)]] * 3)
    assert len(found.lane_ranks) == 3
    assert found.collectives()["bytes"].sum() == 2 * 2 * 8


def test_a_collective_of_a_trace_runs_with_the_algorithm_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    paths = [tmp_path / f"t.{rank}.et" for rank in range(12)]
    for rank, path in enumerate(paths):  # ranks 0 to 2 and 11 have a group of their own
        group = "few" if rank in {0, 1, 2, 11} else "many"
        write_nodes(path, [collective(1, 4_000_000, pg_name=group)])
    found = ss.simulate.chakra(paths, LINK, algorithms={"all_reduce": "tree"})
    asked = {
        "op": "all_reduce",
        "algorithm": "tree",
        "num_bytes": 4_000_000,
        "bandwidth": 1e9,
        "latency": 1e-4,
    }
    assert found.step_time_s == pytest.approx(float(collective_time(workers=8, **asked)), rel=1e-6)
    few = max(event.end_s for event in found.timeline.events if event.rank in {0, 1, 2, 11})
    assert few == pytest.approx(float(collective_time(workers=4, **asked)), rel=1e-6)
    assert found.merged == ("All ranks send over equal links; all_reduce is tree.",)
    with pytest.raises(ss.SpecError, match="algorithms='all_scatter' is not"):
        ss.simulate.chakra(paths, LINK, algorithms={"all_scatter": "tree"})
    with pytest.raises(
        ss.SpecError, match="algorithm='pairwise' does not simulate op='all_reduce'; use 'ring' or"
    ):
        ss.simulate.chakra(paths, LINK, algorithms={"all_reduce": "pairwise"})


def collective(id_: int, size: int = 8, op: int = 0, **about: str) -> TraceNode:
    return TraceNode(id_, "sum", COLLECTIVE, attributes={"comm_type": op, "comm_size": size, **about})


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (([collective(1), collective(2)], [collective(1)]), r"collective 2 of the default group, 'sum', .*not by"),
        (([collective(1, pg_name="[0, 1]")], []), r"pg_name='\[0, 1\]', 'sum', .* not by ranks \[1\]"),
        (([collective(1)], []), r"ranks \[0\] but not by ranks \[1\]"),
        (
            ([collective(1, pg_name="dp")] * 2, [collective(1, pg_name="dp")], [collective(1, pg_name="tp")]),
            r"the group pg_name='dp', 'sum', is called by ranks \[0\] but not by ranks \[1\]",
        ),
        (([collective(1)], [collective(1, 16)]), r"comm_size of collective 1 .*\{0: 8, 1: 16\}"),
        (([collective(1)], [collective(1, op=2)]), r"comm_type of collective 1 .*\{0: 0, 1: 2\}"),
    ],
)  # fmt: skip
def test_ranks_of_a_group_must_call_the_same_collectives(
    ranks: tuple[list[TraceNode], ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.SpecError, match=told):
        replay(tmp_path, *ranks)


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    with pytest.raises(ss.SpecError, match=r"no.et is not a Chakra trace \(.*; give a file such as"):
        ss.simulate.chakra([tmp_path / "no.et"], LINK)


def test_a_receive_waits_for_its_dependencies_and_its_message(tmp_path: Path) -> None:
    receiver = [work(1, 1.0), message(2, RECEIVE, (1,)), work(3, 0.5, (2,))]
    early = replay(tmp_path, [message(1, SEND, seconds=0.25)], receiver)
    assert early.step_time_s == pytest.approx(1.5)
    late = replay(tmp_path, [message(1, SEND, seconds=2.0)], receiver)
    assert late.step_time_s == pytest.approx(2.5)


def test_a_message_needs_only_its_other_end(tmp_path: Path) -> None:
    """ASTRA-sim's own traces leave out the source of a send and the destination of a receive."""
    sent = TraceNode(1, "message", SEND, attributes={"comm_size": 10**9, "comm_dst": 2})
    received = TraceNode(1, "message", RECEIVE, attributes={"comm_size": 10**9, "comm_src": 1})
    found = replay(tmp_path, [], [sent], [received])
    assert found.step_time_s == pytest.approx(1.0)
    assert found.links()["link"].tolist() == ["rank 1, out", "rank 2, in"]


def test_traces_of_some_ranks_keep_the_numbers_that_their_messages_name(tmp_path: Path) -> None:
    about = {"comm_size": 10**9, "comm_src": 6, "comm_dst": 7}
    found = replay(tmp_path, *([TraceNode(1, "message", kind, attributes=about)] for kind in (SEND, RECEIVE)))
    assert found.links()["link"].tolist() == ["rank 0, out", "rank 1, in"]


@pytest.mark.parametrize("tags", [(0, 0), (0, 1)])
def test_messages_with_the_same_tag_are_all_sent(tags: tuple[int, int], tmp_path: Path) -> None:
    sends = [message(2 + k, SEND, (1,), tag=tag) for k, tag in enumerate(tags)]
    receives = [message(1 + k, RECEIVE, tag=tag) for k, tag in enumerate(tags)]
    found = replay(tmp_path, [work(1, 1.0), *sends], receives)
    assert found.step_time_s == pytest.approx(3.0)
    assert found.links()["bytes"].tolist() == [2e9, 2e9]
    parts = {part.name: part.value for part in found.time.parts}
    assert parts == pytest.approx({"work": 1.0, "message": 2.0})


def test_messages_with_the_same_tag_are_matched_in_the_order_of_ids(tmp_path: Path) -> None:
    """The first message is small and arrives at once, wherever its nodes are in the files."""
    sends = [message(2, SEND, (1,), seconds=2.0), message(1, SEND, seconds=0.25)]
    found = replay(tmp_path, sends, [message(7, RECEIVE), message(8, RECEIVE), work(9, 1.0, (7,))])
    (start,) = (e.start_s for e in found.timeline.events if e.kind == "work")
    assert start == pytest.approx(0.25)


def test_a_step_lasts_until_its_last_message_has_arrived(tmp_path: Path) -> None:
    assert replay(tmp_path, [message(1, SEND)], [message(1, RECEIVE)]).step_time_s == pytest.approx(1.0)
    found = replay(tmp_path, [message(1, SEND, seconds=3.0)], [work(1, 1.0), message(2, RECEIVE, (1,))])
    assert found.step_time_s == pytest.approx(3.0)


def test_computations_of_a_rank_run_one_at_a_time_in_the_order_of_ids(tmp_path: Path) -> None:
    found = replay(tmp_path, [work(3, 2.0), work(1, 1.0), work(2, 4.0, (3,))])
    assert found.step_time_s == pytest.approx(7.0)
    assert [e.end_s - e.start_s for e in found.timeline.events] == pytest.approx([1.0, 2.0, 4.0])
    assert found.idle_fraction == pytest.approx(0.0)
    both = replay(tmp_path, [work(1, 1.0), work(2, 2.0)], [work(1, 1.5)])
    assert both.step_time_s == pytest.approx(3.0)


def test_an_order_that_messages_require_comes_before_the_order_of_ids(tmp_path: Path) -> None:
    """In the order of ids, each rank's first computation would wait for a message after the other's second one."""
    back = {"comm_src": 1, "comm_dst": 0, "comm_size": 0}
    first = [
        TraceNode(1, "reply", RECEIVE, attributes=back), work(2, 1.0, (1,)), work(3, 2.0),
        message(4, SEND, (3,), seconds=0.0),
    ]  # fmt: skip
    other = [
        message(1, RECEIVE), work(2, 4.0, (1,)), work(3, 8.0), TraceNode(4, "reply", SEND, (3,), attributes=back),
    ]  # fmt: skip
    found = replay(tmp_path, first, other)
    seconds = [
        [e.end_s - e.start_s for e in found.timeline.events if e.rank == k and e.kind == "work"]
        for k in (0, 1)
    ]
    assert seconds == [pytest.approx([2.0, 1.0]), pytest.approx([4.0, 8.0])]
    assert found.step_time_s == pytest.approx(15.0)


def test_computations_of_different_streams_overlap(tmp_path: Path) -> None:
    nodes = [
        work(1, 3.0, stream=7),
        work(2, 1.0, stream=20),
        work(3, 1.0, stream=20),
        work(4, 4.0, (3,), stream=20),
    ]
    host = TraceNode(5, "launch", COMPUTE, (), 0, SECOND, {"is_cpu_op": True, "tid": 7})
    found = replay(tmp_path, [*nodes, host])
    assert found.step_time_s == pytest.approx(6.0)
    assert found.idle_fraction == pytest.approx(0.0)


def test_the_overlap_of_a_step_survives_in_its_chakra_trace(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    model = ss.Model.transformer(
        layers=8, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32000, seq=1024
    )
    cluster, layout = (
        ss.Cluster.of("a100-80gb", nodes=4, per_node=4),
        ss.Layout(data=8, tensor=2, zero=3, global_batch=16),
    )
    found = ss.simulate(model, cluster, layout)
    assert not all(found.done.graph.is_serial)
    found.export(tmp_path / "step", format="chakra")
    again = ss.simulate.chakra([tmp_path / "step.0.et"], LINK)
    assert again.step_time_s == pytest.approx(found.step_time_s, rel=1e-3)
    assert again.idle_fraction >= 0


def test_a_message_without_its_other_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ss.SpecError, match=r"node 4 of rank 1 receives .* from rank 0 with tag 9, but no rank sends it"
    ):
        replay(tmp_path, [work(1, 1.0)], [message(4, RECEIVE, tag=9)])
    with pytest.raises(
        ss.SpecError, match=r"node 3 of rank 0 sends .* to rank 1 with tag 0, but no rank receives it"
    ):
        replay(tmp_path, [message(2, SEND), message(3, SEND)], [message(2, RECEIVE)])


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
