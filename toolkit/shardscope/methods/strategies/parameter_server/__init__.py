"""Parameter server: one central server, or several that share the parameters, and workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.strategy import Strategy, Work

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job

MODES = ("sync", "async", "ssp")


def _known_mode(value: object) -> object:
    if value not in MODES:
        raise unknown_name("mode", value, MODES)
    return value


class ParameterServer(Strategy):
    """Workers push gradients to servers, which update the parameters, and pull the new parameters from them.

    The staleness of a gradient is the number of updates that its server applies between the pull of the parameters on
    which it was computed and its own application. A server applies gradients as soon as they arrive, unless that would
    make the gradient of a worker that is still computing staler than the bound. Then gradients wait, and their mean is
    applied as one update. An update with n of the m workers' gradients uses n/m of the learning rate, so that
    parameters move as far in total as in a synchronous run. A bound of 0 makes the run synchronous: every update uses
    the gradients of all workers.

    Compressed gradients are sent as one packet per server, which unpacks it; parameters are sent back
    uncompressed. Each worker keeps its own error-feedback residual.

    Li et al., Scaling distributed machine learning with the parameter server (OSDI 2014); Ho et al., More effective
    distributed ML via a stale synchronous parallel parameter server (NIPS 2013).
    """

    name = "parameter-server"
    variant = "mode"
    family = "A central server"
    look = MethodStyle("#b866a6", "dashdot", "star")
    carries = frozenset({"sums", "packets"})

    mode: Annotated[Literal["sync", "async", "ssp"], BeforeValidator(_known_mode)] = "sync"
    """Bound of the staleness: 0 (``sync``), none (``async``), or `staleness` (``ssp``, stale synchronous parallel)."""
    staleness: CountOrZero = 1
    """Maximum staleness of a gradient in mode ``ssp``, in updates, at least 0; 0 is synchronous."""
    servers: Count = 1
    """Number of servers, on the lowest ranks. Each holds whole tensors, balanced by size, and their optimizer state."""
    dedicated: bool = False
    """Whether servers' ranks only serve; if not, they are also workers, and serve in background threads."""

    @model_validator(mode="after")
    def _bound_is_asked_for(self) -> Self:
        default = type(self).model_fields["staleness"].default
        if self.mode != "ssp" and self.staleness != default:
            raise SpecError(
                f"staleness={self.staleness} has no effect with mode={self.mode!r}; leave it out, or use mode='ssp'"
            )
        return self

    @property
    def label(self) -> str:
        """Name with options, such as ``parameter-server`` or ``parameter-server:async, 2 servers, dedicated``."""
        mode = "" if self.mode == "sync" else f":{self.mode}"
        servers = f", {self.servers} servers" if self.servers > 1 else ""
        return f"{self.name}{mode}{servers}{', dedicated' if self.dedicated else ''}"

    @property
    def bound(self) -> float:
        """Maximum staleness of a gradient, in updates; infinite in mode ``async``."""
        return {"sync": 0.0, "async": math.inf, "ssp": float(self.staleness)}[self.mode]

    @property
    def clips_at_servers(self) -> bool:
        """Whether servers clip the mean of all gradients, which is exact; else each worker clips its own gradient."""
        return self.bound == 0

    def num_data_ranks(self, world_size: int) -> int:
        """Return the number of workers: all ranks, except dedicated servers."""
        return max(1, world_size - self.servers) if self.dedicated else world_size

    def workers(self, world_size: int) -> range:
        """Return the ranks that compute gradients."""
        return range(self.servers if self.dedicated else 0, world_size)

    def role(self, rank: int, world_size: int) -> str:
        """Return the role of a rank: ``server``, ``worker``, or ``server and worker``."""
        if rank >= self.servers:
            return "worker"
        return "server" if self.dedicated else "server and worker"

    @property
    def hides_noise_because(self) -> str:
        """Why the gradient noise scale cannot be measured under this strategy."""
        return "gradients reach the servers at different times, and not in a collective"

    def drift(self, world_size: int) -> int | None:
        """Return 0, or None if gradients may be stale; then a worker may be any number of steps ahead of another."""
        return 0 if self.bound == 0 else None

    @property
    def differs_because(self) -> str | None:
        """Why results differ from one process: updates use stale gradients; None in a synchronous run."""
        return (
            None
            if self.bound == 0
            else "gradients are applied as they arrive, to newer parameters than they were computed on"
        )

    def shards(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return the indices of the tensors of each server, in ascending order.

        The largest tensors are assigned first, each to the server with the fewest elements so far.

        Args:
            sizes: Number of elements in each tensor.

        Example:
            >>> ParameterServer(servers=2).shards([10, 600, 300, 290])
            [[1], [0, 2, 3]]
        """
        held: list[list[int]] = [[] for _ in range(self.servers)]
        load = [0] * self.servers
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            server = load.index(min(load))
            held[server].append(index)
            load[server] += sizes[index]
        return [sorted(indices) for indices in held]

    def check(self, job: Job) -> None:
        """Refuse more servers than ranks, and gradient clipping in LAMB if no server receives whole gradients."""
        world_size = job.world_size
        most = world_size - 1 if self.dedicated else world_size
        if self.servers > most:
            reason = " that leave a worker" if self.dedicated else ""
            raise SpecError(
                f"strategy.servers={self.servers} is more than world_size={world_size} has ranks{reason}; "
                f"use at most {most}"
            )
        norm = job.optimizer.settings.get("max_grad_norm", "off")
        if self.servers > 1 and not self.clips_at_servers and norm != "off":
            raise SpecError(
                f"optimizer.max_grad_norm={norm} needs the whole gradient, of which each of servers={self.servers} "
                f"sees a part in mode={self.mode!r}; use max_grad_norm='off' with clip_norm={norm}, or servers=1"
            )

    @property
    def ranks_meet(self) -> bool:
        """Whether all ranks exchange gradients together: only if no gradient may be stale."""
        return self.bound == 0

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return S bytes to and from each worker, except between a worker and a server on the same rank."""
        remote = len(self.workers(world_size)) - (0 if self.dedicated else 1)
        return 2.0 * remote * gradient_bytes

    def activations(self, step: JobStep) -> list[float] | None:
        """Return the activation bytes of each rank; 0 for dedicated servers."""
        saved = super().activations(step)
        workers = self.workers(step.world_size)
        return saved and [held * (rank in workers) for rank, held in enumerate(saved)]

    def work(self, step: JobStep) -> list[Work]:
        """Return the work of each rank: 1 for workers, 0 for dedicated servers. Serving in threads is not counted."""
        return [Work(float(rank in self.workers(step.world_size))) for rank in range(step.world_size)]

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of one push and one pull per worker, of headers, and of squared norms that servers sum."""
        from shardscope.analytic.communication.parameter_server import parameter_server_traffic

        sizes, now, job = [row.num_elements for row in step.trained], step.compression, step.job
        held = [sum(sizes[index] for index in shard) for shard in self.shards(sizes)]
        pulled = [count * step.element_bytes for count in held]
        pushed = pulled
        if isinstance(now, PackedCompression):
            pushed = [now.packet_bytes(count) for count in held]
        norms = job.optimizer.norm_sums([len(row.shape) for row in step.trained])
        sums = norms.of_gradient + (job.clip_norm is not None and self.clips_at_servers)
        return parameter_server_traffic(
            pushed, pulled, step.world_size, dedicated=self.dedicated, sums=int(sums)
        )

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes of a model copy on every rank, of gradients on every worker, and of shards on servers."""
        from shardscope.analytic.memory.servers import server_states

        rows = step.trained
        shards = self.shards([row.num_elements for row in rows])
        method = step.job.compression
        pack = method.packet_bytes if isinstance(method, PackedCompression) else None
        held = [[rows[index] for index in shard] for shard in shards]
        return server_states(step, held, dedicated=self.dedicated, pack=pack)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.parameter_server._torch import ParameterServerRank

        return ParameterServerRank(job, context)
