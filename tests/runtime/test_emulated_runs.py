"""Runs on emulated clusters: the same numbers as on this machine, over TCP, an agent a node; and their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import shardscope as ss
from conformance.emulated import EmulatedNetwork, are_gone, host_traces, made_by, needs_namespaces
from conformance.runs import agent_pid, all_gone, endless_job, family, rank_pids, small_job, wait_for
from shardscope.runtime.emulated.node import PORT
from shardscope.spec.cluster.emulated import PAYLOAD

PAIR = ss.Cluster.emulated(nodes=2, bandwidth="1 Gbit/s")


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    needs_namespaces()


def losses(run: ss.Run, rank: int = 0) -> list[float]:
    return [event["loss"] for event in run.events("step", rank=rank)]


def hub_of(run: ss.Run) -> int:
    """The hub of a run's network, once it exists."""
    agent = psutil.Process(agent_pid(run))
    return next(
        child.pid for child in agent.children() if any("emulated.hub" in part for part in child.cmdline())
    )


@pytest.mark.parametrize(("strategy", "per_node"), [("ring", 1), ("hierarchical", 2), ("zero-3", 1)])
def test_it_trains_as_on_this_machine(strategy: str, per_node: int) -> None:
    job = small_job(strategy=strategy, world_size=2 * per_node, transport="tcp")
    cluster = ss.Cluster.emulated(nodes=2, per_node=per_node)
    run, here = ss.launch(job, cluster), ss.launch(job)
    run.wait(120)
    assert losses(run) == losses(here.wait(120))
    hosts = {event["rank"]: event["host"] for event in run.events("start")}
    assert hosts == {rank: cluster.address(rank // per_node) for rank in range(job.world_size)}
    assert run.cluster == cluster
    assert here.cluster is None


def test_auto_takes_tcp_and_says_why_and_the_summary_says_what_is_emulated() -> None:
    cluster = ss.Cluster.emulated(nodes=2, bandwidth="1 Gbit/s", slowdown={1: 2.0})
    summary = ss.launch(small_job(), cluster).wait(120).summary()
    assert summary.transport == "tcp"
    assert summary.transport_reason is not None
    assert "ranks 0 and 1 are on different emulated nodes" in summary.transport_reason
    assert summary.link == cluster.name
    assert summary.link_note == "computation is emulated, by sleeping: 2 times as long on node 1"


@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
def test_ranks_of_a_single_node_share_memory_without_latency(strategy: str) -> None:
    cluster = ss.Cluster.emulated(nodes=1, per_node=2, latency="20 ms")
    summary = ss.launch(small_job(strategy=strategy), cluster).wait(120).summary()
    assert (summary.transport, summary.link, summary.link_note) == ("shm", cluster.name, None)
    assert ("shared buffers" in str(summary.transport_reason)) == (strategy == "zero-3")


@pytest.mark.slow
def test_it_resumes_on_the_cluster_where_it_was_unless_told_otherwise() -> None:
    job = small_job(checkpoint=ss.Checkpoint(every=5))
    half = ss.launch(job.replace(steps=5), PAIR).wait(120)
    rest, here = ss.launch(job, resume=half), ss.launch(job, "this machine", resume=half)
    assert rest.cluster == PAIR
    assert here.cluster is None
    assert losses(rest.wait(120)) == losses(here.wait(120))
    assert {event["host"] for event in rest.events("start")} == {PAIR.address(0), PAIR.address(1)}


def test_latency_is_the_kernels_or_that_of_the_ranks() -> None:
    """Twenty messages one after the other take twenty latencies, whoever adds them."""
    cluster = ss.Cluster.emulated(nodes=2, latency="20 ms")
    run = ss.launch(small_job(strategy="ring", steps=10), cluster).wait(120)
    spans = run.timeline().query("lane == 'communication' and name == 'ring_all_reduce'")
    assert (spans.end_s - spans.start_s).groupby(spans["rank"]).sum().min() >= 10 * 2 * 0.02


def test_a_slow_node_sleeps_in_its_computation() -> None:
    cluster = ss.Cluster.emulated(nodes=2, slowdown={1: 50.0})
    times = ss.launch(small_job(steps=8), cluster).wait(120).timeline()
    computing = times[times.name.isin(["forward", "backward"]) & (times.step > 1)]
    by_rank = (computing.end_s - computing.start_s).groupby(computing["rank"]).sum()
    assert by_rank[1] > 5 * by_rank[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", ss.Pipeline(split="even")], ids=["ring", "pipeline"])
def test_computation_takes_at_least_the_stated_and_predicted_time(strategy: str | ss.Strategy) -> None:
    cluster = ss.Cluster.emulated(nodes=2, flops="20 MFLOP/s", memory_bandwidth="10 MB/s")
    run = ss.launch(small_job(strategy=strategy, steps=5), cluster).wait(120)
    summary, expected = run.summary(), ss.predict(run.job, cluster).time
    assert expected is not None
    assert summary.late_s_per_step is not None
    assert str(summary.link_note).startswith(
        "computation is emulated, by sleeping: 20 MFLOP/s per rank, updates at 10 MB/s"
    )
    times = run.timeline().query("step > 1")
    times["seconds"] = times.end_s - times.start_s
    slowest = times.groupby(["step", "rank", "name"]).seconds.sum().groupby(["step", "name"]).max()
    rounding = 1e-4  # times in events are rounded to microseconds
    assert slowest[:, "forward"].min() >= expected["forward"].value - rounding
    assert slowest[:, "optimizer"].min() >= (expected["optimizer"].value if strategy == "ring" else 0)
    assert summary.step_time_s > expected["forward"].value + expected["backward"].value


@pytest.mark.slow
def test_a_comparison_takes_the_cluster_of_the_run() -> None:
    run = ss.launch(small_job(), PAIR).wait(120)
    found = ss.compare(run)
    assert found.where == PAIR.name
    assert found["bytes", "ring_all_reduce"].agrees
    expected = ss.predict(run.job, PAIR)
    assert expected.time is not None
    ring = expected.time["ring_all_reduce"]
    assert found["time", "communication"].predicted == expected.time["communication"].value
    assert expected.host is not None
    share = expected.host.value("link_efficiency", ranks=2, transport="network")
    assert ring.inputs["bandwidth"] == pytest.approx(share * 1.25e8 * 1448 / 1538)


@pytest.mark.slow
def test_an_all_reduce_by_rack_is_faster_than_a_ring_can_be_over_slow_uplinks() -> None:
    """A ring sends 1.5 times the gradients over each uplink, an all-reduce by rack once; nothing else takes as long."""
    cluster = ss.Cluster.emulated(4, "50 Mbit/s", racks=2, rack_bandwidth="5 Mbit/s")
    rate = 5e6 / 8 * PAYLOAD
    fields = {"world_size": 4, "steps": 4, "batch": 16}
    runs = [  # one after the other: eight ranks at once delay each other
        ss.launch(small_job(strategy=strategy, **fields), cluster).wait(120)
        for strategy in ("ring", ss.Hierarchical(per_node=2))
    ]
    ring, by_rack = (float(run.metrics()["step_time_s"].iloc[1:].min()) for run in runs)
    size = 4 * ss.predict(runs[0].job, cluster).step.num_elements
    assert ring > 0.95 * 1.5 * size / rate
    assert 0.95 * size / rate < by_rack < ring / 1.2


@pytest.mark.slow
def test_it_is_reproduced_on_an_equal_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the state of this checkout is no difference
    run = ss.launch(small_job(), PAIR).wait(120)
    again = ss.reproduce(run).wait(120)
    assert again.cluster == PAIR
    assert losses(again) == losses(run)


@pytest.mark.slow
def test_the_links_carry_the_metered_bytes_and_their_headers() -> None:
    job = small_job(model="cnn", strategy="ring", steps=20, world_size=2)
    run = ss.launch(job.replace(steps=1_000_000), PAIR)
    rank_pids(run)
    network = Path(f"/proc/{hub_of(run)}/net/dev")
    before, first = link_bytes(network), sum(sent_by_step(run).values())
    wait_for(lambda: len(sent_by_step(run)) > 200, run)
    after, last = link_bytes(network), sum(sent_by_step(run).values())
    run.stop()
    ratio = (after - before) / (last - first)
    assert 1.0 < ratio < 1.12, (
        "headers take 66 of 1514 bytes, acknowledgements and the last steps a little more"
    )


def sent_by_step(run: ss.Run) -> dict[int, int]:
    """Bytes that rank 0 has sent in each step, by the meter."""
    return {
        event["step"]: sum(row["sent_bytes"] for row in event["traffic"].values())
        for event in run.events("step", rank=0)
    }


def link_bytes(counters: Path) -> int:
    """Bytes that node 0 has sent, by the counter of its port on the switch."""
    row = next(line for line in counters.read_text().splitlines() if line.strip().startswith("n0:"))
    return int(row.split(":")[1].split()[0])


@pytest.mark.slow
def test_it_stops_and_keeps_the_parameters_together() -> None:
    run = ss.launch(endless_job(), PAIR)
    rank_pids(run)
    assert run.stop().state == "stopped"
    assert len({len(losses(run, rank)) for rank in (0, 1)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "node agent", "hub", "coordinator"])
def test_whatever_dies_is_named_and_nothing_is_left(victim: str) -> None:
    before = host_traces()
    run = ss.launch(endless_job(), PAIR)
    ranks = rank_pids(run)
    hub, processes, coordinator = hub_of(run), family(run), agent_pid(run)
    namespaces = made_by(hub)
    assert len(namespaces) == 3
    agents = [child.pid for child in psutil.Process(coordinator).children() if child.pid != hub]
    pid, told = {
        "rank": (ranks[1], "rank 1 of strategy 'ring' was killed by SIGKILL"),
        "node agent": (agents[1], f"the agent of emulated node . \\(process {agents[1]}\\) was killed"),
        "hub": (hub, "the network of the emulated cluster .* was killed"),
        "coordinator": (coordinator, "agent of run .* was killed"),
    }[victim]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ss.RunFailed, match=told):
        run.wait(60)
    assert run.cause == "killed"
    assert all_gone([*processes, hub, *agents])
    assert are_gone(namespaces)
    assert host_traces() == before


@pytest.mark.slow
def test_a_rank_that_fails_on_one_node_leaves_its_reason() -> None:
    run = ss.launch(small_job(model="mlp", data="/no/such/file.npz"), PAIR)
    with pytest.raises(ss.RunFailed, match="/no/such/file.npz"):
        run.wait(120)
    assert "hostname" in run.logs(1) or run.logs(1) != run.logs(0) or run.logs(1) == ""


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ({"world_size": 3, "batch": 48}, "world_size=3 does not match the 2 ranks of 2 emulated nodes"),
        ({"link": "25GbE"}, "cannot be combined with an emulated cluster"),
        ({"device": "cuda"}, "device='cuda' does not run on an emulated cluster"),
        ({"transport": "shm"}, "transport='shm' does not reach across the 2 emulated nodes"),
    ],
)
def test_what_cannot_run_there_is_refused_before_it_starts(job: dict[str, object], told: str) -> None:
    with pytest.raises(ss.SpecError) as refused:
        ss.launch(small_job(**job), PAIR)
    assert told in str(refused.value)


def test_a_cluster_of_other_machines_is_refused() -> None:
    with pytest.raises(ss.errors.LaunchError, match="start the job on your machines with torchrun"):
        ss.launch(small_job(), ss.Cluster.of("h100", nodes=1, per_node=2))  # type: ignore[arg-type]


@pytest.mark.slow
def test_plain_torchrun_on_two_nodes_gives_the_run_that_launch_gives(tmp_path: Path) -> None:
    """One agent a node, c10d rendezvous by the first node's address, nothing of Shardscope's own agents."""
    job = small_job(world_size=4, steps=15)
    (tmp_path / "job.json").write_text(job.to_json())
    cluster = ss.Cluster.emulated(nodes=2, per_node=2)
    with EmulatedNetwork(cluster) as links:
        agents = [links.popen(node, torchrun(cluster.address(0), tmp_path), **PIPED) for node in range(2)]
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
        sent = sum(each.sent_bytes for each in links.counters())
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    run, launched = ss.Run.attach(tmp_path / "run"), ss.launch(job, cluster).wait(120)
    assert [losses(run, rank) for rank in range(4)] == [losses(launched, rank) for rank in range(4)]
    assert {event["host"] for event in run.events("start")} == {cluster.address(0), cluster.address(1)}
    metered = run.summary().bytes_per_step
    assert metered == launched.summary().bytes_per_step
    assert metered is not None
    assert sent > 15 * metered / 2, "of the ring's four hops, two are between the nodes"


PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def torchrun(host: str, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{PORT}", "--rdzv-id=emulated",
        "-m", "shardscope.runtime.worker", "--job", str(folder / "job.json"), "--run-dir", str(folder / "run"),
    ]  # fmt: skip
