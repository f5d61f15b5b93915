"""The agent of one emulated node: PyTorch elastic with the c10d rendezvous, as it runs on one of several machines.

It is a fork of the run's coordinator that has entered the node's namespaces. It starts its ranks, waits for them, and
writes the result to a pipe.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardscope._compat import (
    PIPE_CLOSED,
    fork_forkserver,
    forkserver_ended_with,
    forkserver_pid,
    known_exit_codes,
    started_processes,
)
from shardscope.runtime import worker
from shardscope.runtime.agent.failure import BY_AGENT
from shardscope.runtime.agent.left_behind import Left, LeftBehind, living
from shardscope.runtime.emulated.network import EmulatedNetwork, on_interface
from shardscope.runtime.record.processes import die_with_parent, end_ranks_of, ignore_interrupts
from shardscope.runtime.record.rundir import RunDir
from shardscope.training.emulation import Emulation

PORT = 29_400
"""Port of the rendezvous on node 0; each node has all ports to itself."""
_POLL_S = 0.05


@dataclass
class NodeResult:
    """How the ranks of one node ended.

    Attributes:
        state: ``"completed"``, ``"stopped"``, ``"terminated"``, ``"failed"`` or ``"not started"``.
        failures: Exit codes of the ranks that had failed when elastic first checked, by rank.
        exit_codes: Known exit codes of the node's rank processes, by pid.
        forkserver: Pid and exit code of the node's forkserver if it has ended.
        message: Why the ranks could not be started.
        traceback: Traceback of the error in `message`.
    """

    state: str
    failures: dict[int, int] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    forkserver: tuple[int, int] | None = None
    message: str = ""
    traceback: str = ""

    def to_json(self) -> bytes:
        """Return the result as a line of JSON, for the pipe to the coordinator."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> NodeResult:
        """Read the result from JSON, whose keys are strings."""
        fields = json.loads(text)
        for name in ("failures", "exit_codes"):
            fields[name] = {int(key): value for key, value in fields[name].items()}
        return cls(**fields)


def run_node(run: RunDir, request: dict[str, Any], network: EmulatedNetwork, node: int, result: int) -> None:
    """Run the agent of `node` in this forked child: run its ranks to their end, and write the result to a pipe.

    Args:
        run: The run directory.
        request: The launch request.
        network: The cluster's network, which the coordinator has started.
        node: The node.
        result: File descriptor of the pipe to the coordinator.
    """
    coordinator = os.getppid()
    network.enter(node)
    network.let_go()
    die_with_parent()  # after entering: the system forgets it when a process changes its user namespace
    if os.getppid() != coordinator:
        os._exit(1)
    ignore_interrupts()
    os.environ.update(on_interface())
    os.environ.update(Emulation(network.cluster, node, network.delays_in_kernel).to_env())
    folder = run.path / "control" / f"node-{node}"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "forkserver").unlink(missing_ok=True)  # of an agent that was killed
    fork_forkserver(folder)

    def tell(found: NodeResult) -> None:
        (folder / "forkserver").unlink(missing_ok=True)
        # the descriptor stays open until this process ends: then its end is noticed at once
        with os.fdopen(result, "wb", closefd=False) as pipe:
            pipe.write(found.to_json())

    tell(_Ranks(LeftBehind(run, earlier=set()), tell).run(_config(run, network, node), request))


class _Ranks:
    """The rank processes of a node and their exit codes, of which elastic reports the first failures only.

    Args:
        behind: Detects ranks that have ended in mid-training, for whose results elastic would wait forever.
        tell: Called with the result of the node if all of its ranks have ended in mid-training.
    """

    def __init__(self, behind: LeftBehind, tell: Callable[[NodeResult], None]) -> None:
        self._behind, self._tell = behind, tell
        self._seen: set[BaseProcess] = set()
        self._left_behind: set[int] = set()  # pids of ranks that this agent has killed for that reason
        self._over = threading.Event()

    def run(self, config: LaunchConfig, request: dict[str, Any]) -> NodeResult:
        """Start the ranks and wait for them."""
        threading.Thread(target=self._watch, name="watcher", daemon=True).start()
        try:
            return self._run(config, request)
        finally:
            self._over.set()

    def _run(self, config: LaunchConfig, request: dict[str, Any]) -> NodeResult:
        try:
            states = elastic_launch(config, worker.main)(
                request["run"], request["resume"], request["code"], request["modules"]
            )  # fmt: skip
        except SignalException:
            return NodeResult("terminated")
        except ChildFailedError as failed:
            codes = {int(rank): failure.exitcode for rank, failure in failed.failures.items()}
            seen = self._exit_codes()
            ended = forkserver_ended_with([*codes.values(), *seen.values()])
            return NodeResult("failed", codes, seen, ended)
        except Exception as error:  # noqa: BLE001 - becomes the run's error
            traceback.print_exc()
            ended = forkserver_ended_with([PIPE_CLOSED] if isinstance(error, OSError | EOFError) else [])
            return NodeResult(
                "not started", exit_codes=self._exit_codes(), forkserver=ended,
                message=str(error), traceback=traceback.format_exc(),
            )  # fmt: skip
        return NodeResult("stopped" if "stopped" in states.values() else "completed")

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            self._seen |= started_processes()
            codes = known_exit_codes(self._seen)
            left = self._behind.look(codes)
            if left is Left.SOME:
                self._left_behind |= living(codes)
                forkserver = forkserver_pid()
                end_ranks_of(os.getpid(), spared=set() if forkserver is None else {forkserver})
            elif left is Left.ALL:
                unfinished = self._behind.unfinished()
                silent = {unfinished[pid]: 0 for pid in codes.keys() & unfinished.keys()}
                self._tell(NodeResult("failed", silent, dict.fromkeys(codes, 0)))
                leave(0)

    def _exit_codes(self) -> dict[int, int]:
        self._seen |= started_processes()
        codes = {process.pid: process.exitcode for process in self._seen}
        return {
            pid: BY_AGENT if pid in self._left_behind else code
            for pid, code in codes.items()
            if pid is not None and code is not None
        }


def _config(run: RunDir, network: EmulatedNetwork, node: int) -> LaunchConfig:
    cluster = network.cluster
    count, logs = len(cluster.nodes), run.path / "logs" / f"node-{node}"
    logs.mkdir(mode=0o700, exist_ok=True)
    return LaunchConfig(
        min_nodes=count, max_nodes=count, nproc_per_node=cluster.per_node, run_id=run.path.name, role="rank",
        rdzv_backend="c10d", rdzv_endpoint=f"{cluster.address(0)}:{PORT}", rdzv_configs={"is_host": node == 0},
        local_addr=cluster.address(node), max_restarts=0, monitor_interval=0.02, start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip


def leave(code: int) -> None:
    """Flush the output and end this process at once, because threads of elastic may still be waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
