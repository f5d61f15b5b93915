"""The agent of a run on an emulated cluster: it holds the network, and starts and watches the agents of the nodes.

    launch server ── fork ──▶ coordinator ── fork ──▶ node agents, each in its namespaces ── forkserver ──▶ ranks
                                  └─ hub, which holds the namespaces

Like any agent of a run, it handles stop requests, ends the run when its driver ends, and writes the final status. All
node agents are forked before it starts its first thread, or, after a failure, while its threads wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardscope.errors import LaunchError
from shardscope.runtime.agent.agent import Agent
from shardscope.runtime.agent.failure import Ending, describe_failure, describe_lost_forkserver
from shardscope.runtime.agent.replicas import ReplicaMemory
from shardscope.runtime.agent.restarts import ResumePoint
from shardscope.runtime.emulated import node as nodes
from shardscope.runtime.emulated.link_faults import LinkFaults
from shardscope.runtime.emulated.network import EmulatedNetwork
from shardscope.runtime.emulated.node import NodeResult
from shardscope.runtime.record.processes import kill_descendants
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job

_POLL_S = 0.05
_PATIENCE_S = 5.0
"""Time that other nodes have to notice failed ranks of one node before they are killed, in seconds."""


@dataclass
class _NodeAgent:
    """The coordinator's view of a node's agent."""

    pid: int
    pipe: int
    """Read end of the pipe that the agent writes its result to; non-blocking. Processes that the agent has started
    inherit the write end, so the pipe may stay open after the agent has ended."""
    result: NodeResult | None = None
    exit_code: int | None = None
    """Exit code if the agent ended without a result; the negative signal number if a signal killed it."""
    was_killed: bool = False
    """Whether the coordinator has killed it."""
    _text: bytes = b""

    @property
    def has_ended(self) -> bool:
        return self.result is not None or self.exit_code is not None

    @property
    def has_failed(self) -> bool:
        if self.result is None:
            return self.exit_code is not None
        return self.result.state in {"failed", "not started"}

    def poll(self) -> None:
        """Take the agent's result or its exit code if it has ended."""
        is_closed = self._read()
        ended, status = os.waitpid(self.pid, 0 if is_closed else os.WNOHANG)
        if not ended:
            return
        if not is_closed:
            self._read()  # what the agent wrote just before it ended
        os.close(self.pipe)
        if self._text.endswith(b"\n"):
            self.result = NodeResult.from_json(self._text)
        else:
            self.exit_code = os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Read what is in the pipe, without waiting for more. Return whether all processes have closed the pipe."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 1 << 16):
                self._text += chunk
            return True
        return False


def start_nodes(
    run: RunDir, lifeline: int, request: dict[str, Any], memory: ReplicaMemory | None, why_not: str
) -> Coordinator:
    """Start the network and the node agents; return the coordinator, whose run fails if they cannot be started.

    Args:
        run: The run directory.
        lifeline: File descriptor of the pipe from the launch server.
        request: The launch request.
        memory: Memory in which the ranks keep copies of their state; None if they keep none.
        why_not: Why there is no memory, although the job needs it; an empty string otherwise.
    """
    cluster = run.read_cluster()
    assert cluster is not None
    coordinator = Coordinator(run, lifeline, request, memory, why_not)
    if why_not:
        return coordinator
    try:
        coordinator.network = EmulatedNetwork(cluster)
    except LaunchError as error:
        coordinator.not_started = str(error)
        return coordinator
    _fork_nodes(coordinator, request["resume"])
    return coordinator


def _fork_nodes(coordinator: Coordinator, resume: str | None) -> None:
    assert coordinator.network is not None
    coordinator.agents.clear()
    for node in range(len(coordinator.network.cluster.nodes)):
        coordinator.agents.append(_fork_node(coordinator, node, {**coordinator.request, "resume": resume}))


def _fork_node(coordinator: Coordinator, node: int, request: dict[str, Any]) -> _NodeAgent:
    network = coordinator.network
    assert network is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        os.set_blocking(read, False)
        return _NodeAgent(pid, read)
    code = 1
    try:
        if coordinator.memory is not None:
            os.environ.update(coordinator.memory.env(node))
        for each in (coordinator.lifeline, read, *(other.pipe for other in coordinator.agents)):
            os.close(each)
        nodes.run_node(coordinator.run, request, network, node, write)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing above can handle it in a forked child
        traceback.print_exc()
    finally:
        nodes.leave(code)
    raise AssertionError("unreachable")


class Coordinator(Agent):
    """The agent of a run on an emulated cluster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.network: EmulatedNetwork | None = None
        self.agents: list[_NodeAgent] = []
        self._links = LinkFaults.of_run(self.run)

    def _run_ranks(self) -> Ending:
        ending = super()._run_ranks()
        if self.network is not None:
            self.network.close()
        return ending

    def _attempt(self, job: Job, source: ResumePoint) -> Ending:  # noqa: ARG002 - the nodes have been started from it
        lost = self._wait_for_nodes()
        for node, agent in enumerate(self.agents):
            if self.memory is not None and agent.result is None and not agent.was_killed:
                self.memory.lose(node)  # it has failed, and its memory with it
        return lost or self._ending(job)

    def _helpers(self) -> set[int]:
        return set() if self.network is None else {self.network.hub_pid}

    def _renew(self, source: ResumePoint) -> None:
        assert self.network is not None
        if not self.network.is_alive():
            cluster = self.network.cluster
            self.network.close()
            self.network = None
            try:
                self.network = EmulatedNetwork(cluster)
            except LaunchError as error:
                self.not_started = str(error)
                return
            self._links = LinkFaults.of_run(self.run)
        with self._alone() as goes_on:
            if goes_on:
                _fork_nodes(self, source.resume)

    def _wait_for_nodes(self) -> Ending | None:
        """Wait until all node agents have ended. Return the ending if the loss of the network ended them; else None."""
        assert self.network is not None
        deadline: float | None = None
        lost: Ending | None = None
        while waiting := [agent for agent in self.agents if not agent.has_ended]:
            select.select([agent.pipe for agent in waiting], [], [], _POLL_S)
            for agent in waiting:
                agent.poll()
            if lost is None and not self.network.is_alive():
                lost = self._lost_network()
                self._kill(waiting)
            elif lost is None:
                self._links.carry_out(self.network)
            if deadline is None and any(agent.has_failed for agent in self.agents):
                deadline = time.monotonic() + _PATIENCE_S
            elif deadline is not None and time.monotonic() > deadline:
                self._kill(waiting)
        return lost

    def _kill(self, agents: Sequence[_NodeAgent]) -> None:
        for agent in agents:
            if not agent.has_ended and not agent.was_killed:
                agent.was_killed = True
                kill_descendants(agent.pid)
                os.kill(agent.pid, 9)

    def _lost_network(self) -> Ending:
        assert self.network is not None
        message = (
            f"the network of the emulated cluster (process {self.network.hub_pid}) was killed, by hand or by the "
            "system because memory ran out; its ranks were ended"
        )
        return Ending("failed", error={"message": message}, cause=Cause.KILLED)

    def _ending(self, job: Job) -> Ending:
        """Return how the run ended, from the results of all nodes."""
        for number, agent in enumerate(self.agents):
            if agent.result is None and not agent.was_killed:
                return self._lost_node(number, agent)
        results = [agent.result for agent in self.agents if agent.result is not None]
        for result in results:
            if result.forkserver is not None:
                return describe_lost_forkserver(self.run, job, *result.forkserver)
        failures = {rank: code for result in results for rank, code in result.failures.items()}
        if failures:
            codes = {pid: code for result in results for pid, code in result.exit_codes.items()}
            found = {rank: ProcessFailure(rank, 0, code, "") for rank, code in failures.items()}
            return describe_failure(self.run, job, ChildFailedError("ranks", found), codes)
        states = {result.state for result in results}
        if "not started" in states:
            first = next(result for result in results if result.state == "not started")
            details = {
                "message": f"the ranks could not be started: {first.message}",
                "traceback": first.traceback,
            }
            return Ending("failed", error=details, cause=Cause.NOT_STARTED)
        if "terminated" in states:
            return Ending("stopped", "an agent of a node received SIGTERM", cause=Cause.TERMINATED)
        return (
            Ending("stopped", "asked to stop", cause=Cause.REQUESTED)
            if "stopped" in states
            else Ending("completed")
        )

    def _lost_node(self, node: int, agent: _NodeAgent) -> Ending:
        code = agent.exit_code or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}; see run.logs()"
        message = f"the agent of emulated node {node} (process {agent.pid}) {how}; its ranks ended with it"
        return Ending("failed", error={"message": message}, cause=Cause.KILLED if code < 0 else None)
