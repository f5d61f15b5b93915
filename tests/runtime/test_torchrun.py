"""The same worker under `torchrun`: two agents, as on two machines, meet over loopback and train one job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardscope as ss
from conformance.ports import free_port
from conformance.runs import small_job, wait_for

pytestmark = pytest.mark.slow


def run_agents(job: Path, *folders: Path) -> tuple[list[int], list[str]]:
    """Have one agent for each folder train the job to its end; their exit codes, and what they print."""
    port = free_port()
    agents = [start_agent(node, port, job, folder) for node, folder in enumerate(folders)]
    try:
        outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return [agent.returncode for agent in agents], outputs


def start_agent(node: int, port: int, job: Path, run_dir: Path) -> subprocess.Popen[str]:
    """The README's command, once for each machine."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
        "--master-addr=127.0.0.1", f"--master-port={port}",
        "-m", "shardscope.runtime.worker", "--job", str(job), "--run-dir", str(run_dir),
    ]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.mark.sampled
@pytest.mark.parametrize("shared", [True, False])
def test_two_agents_train_one_job(tmp_path: Path, *, shared: bool) -> None:
    """With one shared run directory, and with one on each machine."""
    job = small_job(world_size=4, steps=15, name="two machines")
    (tmp_path / "job.json").write_text(job.to_json())
    folders = [tmp_path / "run"] * 2 if shared else [tmp_path / "run-0", tmp_path / "run-1"]
    codes, outputs = run_agents(tmp_path / "job.json", *folders)
    assert codes == [0, 0], "\n".join(outputs)
    here = ss.launch(job).wait(60)
    run = ss.Run.attach(folders[0])
    assert run.state == "completed"
    assert {event["rank"] for event in run.events("step")} == ({0, 1, 2, 3} if shared else {0, 1})
    assert [e["loss"] for e in run.events("step", rank=1)] == pytest.approx(
        [e["loss"] for e in here.events("step", rank=1)], rel=1e-6
    )


@pytest.mark.weekly
def test_a_rank_that_fails_under_torchrun_leaves_its_reason(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        small_job(data="/no/such/file.npz", model="mlp", world_size=4).to_json()
    )
    codes, _ = run_agents(tmp_path / "job.json", tmp_path / "run", tmp_path / "run")
    assert all(codes)
    run = ss.Run.attach(tmp_path / "run")
    assert run.state == "failed"
    with pytest.raises(ss.RunFailed, match="/no/such/file.npz"):
        run.wait(10)


@pytest.mark.weekly
def test_a_run_directory_that_is_taken_is_refused(tmp_path: Path) -> None:
    done = ss.launch(small_job()).wait(60)
    (tmp_path / "job.json").write_text(small_job(world_size=4).to_json())
    codes, outputs = run_agents(tmp_path / "job.json", done.path, done.path)
    assert "already contains a run" in "".join(outputs)
    assert all(codes)
    assert ss.Run.attach(done.path).state == "completed"


@pytest.mark.weekly
def test_an_elastic_job_goes_on_when_nodes_join_and_leave(tmp_path: Path) -> None:
    """One node of two ranks, then two nodes, then the first alone again, in one run directory."""
    record, every = ss.Record(parameters=True), ss.Checkpoint(every=1)
    job = small_job(
        world_size=2, elastic="2:4", batch=48, steps=400, checkpoint=every, record=record, timeout_s=15,
        link=ss.Link(bandwidth="50 Mbit/s", latency="20 ms"),
    )  # fmt: skip
    (tmp_path / "job.json").write_text(job.to_json())
    folder, port = tmp_path / "run", free_port()
    first = start_elastic_agent(port, tmp_path / "job.json", folder, is_host=True)
    agents = [first]
    try:
        wait_for(lambda: (folder / "job.json").exists() and ss.Run.attach(folder).reduced().last_step > 3)
        run = ss.Run.attach(folder)
        with pytest.raises(ss.SpecError, match="were started by torchrun; start it on more nodes"):
            run.resize(4)
        second = start_elastic_agent(port, tmp_path / "job.json", folder, is_host=False)
        agents.append(second)
        wait_for(lambda: run.reduced().world_size == 4 and run.reduced().steps[-1].world_size == 4)
        last = run.reduced().last_step
        wait_for(lambda: run.reduced().last_step > last + 2)
        second.kill()
        output, _ = first.communicate(timeout=300)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert first.returncode == 0, output
    assert run.state == "completed"
    assert run.summary().world_sizes == "2 → 4 → 2"
    assert list(run.metrics()["step"]) == list(range(1, 401))


def start_elastic_agent(port: int, job: Path, run_dir: Path, *, is_host: bool) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic",
        f"--rdzv-conf=is_host={is_host},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
        "-m", "shardscope.runtime.worker", "--job", str(job), "--run-dir", str(run_dir),
    ]  # fmt: skip
    env = {
        **os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_torchrun_starts_ranks_again_from_their_newest_checkpoint(tmp_path: Path) -> None:
    job = small_job(steps=12, checkpoint=ss.Checkpoint(every=4))
    (tmp_path / "job.json").write_text(job.to_json())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone",
        "-m", "shardscope.runtime.worker", "--job", str(tmp_path / "job.json"), "--run-dir", str(tmp_path / "run"),
        "--faults", "kill rank=1 step=7",
    ]  # fmt: skip
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    run = ss.Run.attach(tmp_path / "run")
    assert run.state_text == "completed after 1 restart"
    assert run.metrics()["loss"].tolist() == ss.launch(job).wait(60).metrics()["loss"].tolist()
    assert [event["step"] for event in run.events("restart")] == [4]
