"""Parameter server: workers push gradients to one central server, or to several that share the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.look import Arrangement, MethodStyle
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.strategy import Strategy, Work

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job

MODES = ("sync", "async", "ssp")
BUDGETS = ("shared", "per-worker")


def _check_mode(value: object) -> object:
    if value not in MODES:
        raise unknown_name("mode", value, MODES)
    return value


def _check_budget(value: object) -> object:
    if value not in BUDGETS:
        raise unknown_name("budget", value, BUDGETS)
    return value


class ParameterServer(Strategy):
    """Workers push gradients to servers, which update the parameters, and pull the new parameters from them.

    The staleness of a gradient is the number of updates that the server applies after the worker pulled the parameters
    for this gradient, and before the gradient is applied. A server applies gradients as soon as they arrive, unless
    this would make the gradient of a worker that is still computing staler than a bound. In that case, gradients wait,
    and their mean is applied as one update. An update that uses the gradients of n of the m workers has n/m of the
    learning rate, so that parameters move as far in total as in a synchronous run. With a bound of 0, the run is
    synchronous: each update uses the gradients of all workers.

    With `backups`, the run is synchronous, but an update does not wait for this number of workers, and drops the
    gradients of the slowest. A worker whose gradient was dropped continues with the newest parameters at the step that
    the others have reached. Chen et al., Revisiting distributed synchronous SGD (arXiv 1604.00981, 2016), section 3.2.

    With compression, a worker sends one packet to each server, which unpacks it. Parameters are sent back uncompressed.
    Each worker keeps its own error-feedback residual.

    In modes ``async`` and ``ssp``, workers share the run's gradients by default: a worker that has finished a gradient
    takes the next part of the data that no worker has taken, so that a fast worker computes more gradients, and all
    workers end at about the same time. A step then consists of as many gradients as there are workers, regardless of
    which workers computed them, and the learning-rate schedule advances with the number of gradients of all workers.
    Data are read when a worker takes them, without prefetching. With ``budget="per-worker"``, each worker takes its own
    part of every step, and the run ends with the slowest worker.

    Li et al., Scaling distributed machine learning with the parameter server (OSDI 2014); Ho et al., More effective
    distributed ML via a stale synchronous parallel parameter server (NIPS 2013).
    """

    name = "parameter-server"
    variant = "mode"
    family = "A central server"
    look = MethodStyle("#b866a6", "dashdot", "star")
    carries = frozenset({"sums", "packets"})

    mode: Annotated[Literal["sync", "async", "ssp"], BeforeValidator(_check_mode)] = "sync"
    """Bound on staleness: 0 (``sync``), none (``async``), or `staleness` (``ssp``, stale synchronous parallel)."""
    staleness: CountOrZero = 1
    """Maximum staleness of a gradient in mode ``ssp``, in updates, at least 0; with 0, the run is synchronous."""
    backups: CountOrZero = 0
    """Number of slowest workers whose gradients each update drops (mode ``sync``). At most the number of workers
    minus 1."""
    servers: Count = 1
    """Number of servers, which are the lowest ranks. Each holds whole tensors, balanced by size, and their
    optimizer state."""
    dedicated: bool = False
    """Whether server ranks are servers only; otherwise they are also workers, and serve in background threads."""

    budget: Annotated[Literal["shared", "per-worker"], BeforeValidator(_check_budget)] = "shared"
    """Whether workers share the gradients of a run, so that a fast worker computes more of them, or each computes as
    many as the run has steps; only where updates do not wait for all workers (modes ``async`` and ``ssp``)."""

    @model_validator(mode="after")
    def _check_waiting(self) -> Self:
        if self.budget != "shared" and self.bound == 0:
            raise SpecError(
                f"budget={self.budget!r} has no effect with mode={self.mode!r}{', staleness=0' * (self.mode == 'ssp')}"
                ", where each update waits for the workers; leave it out, or use mode='async'"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        default = type(self).model_fields["staleness"].default
        if self.mode != "ssp" and self.staleness != default:
            raise SpecError(
                f"staleness={self.staleness} has no effect with mode={self.mode!r}; leave it out, or use mode='ssp'"
            )
        if self.mode != "sync" and self.backups:
            raise SpecError(
                f"backups={self.backups} has no effect with mode={self.mode!r}, which does not wait for all workers; "
                "leave it out, or use mode='sync'"
            )
        return self

    @property
    def label(self) -> str:
        """Name with options, such as ``parameter-server`` or ``parameter-server:async, 2 servers, dedicated``."""
        mode = "" if self.mode == "sync" else f":{self.mode}"
        mode += f", {self.backups} backup{'s' * (self.backups > 1)}" if self.backups else ""
        servers = f", {self.servers} servers" if self.servers > 1 else ""
        budget = "" if self.budget == "shared" else f", {self.budget} budget"
        return f"{self.name}{mode}{servers}{', dedicated' if self.dedicated else ''}{budget}"

    @property
    def bound(self) -> float:
        """Maximum staleness of a gradient, in updates; infinite in mode ``async``."""
        return {"sync": 0.0, "async": math.inf, "ssp": float(self.staleness)}[self.mode]

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers continue without waiting for the update of all workers: if the staleness bound is not 0."""
        return self.bound > 0

    @property
    def shares_gradients(self) -> bool:
        """Whether workers share the gradients of a run, instead of each computing one per step."""
        return self.is_asynchronous and self.budget == "shared"

    @property
    def clips_at_servers(self) -> bool:
        """Whether servers clip the mean gradient, which is exact; otherwise each worker clips its own gradient."""
        return self.bound == 0 and (not self.backups or self.servers == 1)

    @property
    def is_lockstep(self) -> bool:
        """Whether all workers take each step together: each update uses the gradients of all workers."""
        return self.bound == 0 and not self.backups

    @property
    def num_dropped(self) -> int:
        """Number of the slowest workers whose gradients an update does not wait for."""
        return self.backups

    @property
    def unwaited_because(self) -> str | None:
        """Why other workers do not wait for a slow worker; None if staleness is bounded and no gradient is dropped."""
        if self.backups:
            return f"with backups={self.backups}, updates drop its late gradients instead"
        return "with mode='async', its gradients are only staler" if math.isinf(self.bound) else None

    def num_used(self, world_size: int) -> int:
        """Return the number of workers whose gradients a synchronous update waits for."""
        return self.num_data_ranks(world_size) - self.backups

    @property
    def needs_even_because(self) -> str | None:
        """Why all workers need equal shares of the batch; None in a synchronous run that drops nothing."""
        return None if self.is_lockstep else "an update does not use the gradients of all workers"

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
        """Return 0 in a synchronous run; None otherwise, because a worker may be any number of steps ahead."""
        return 0 if self.is_lockstep else None

    @property
    def differs_because(self) -> str | None:
        """Why results differ from training in one process: stale or dropped gradients; None in a synchronous run."""
        if self.backups:
            return "gradients of the slowest workers are dropped"
        if self.bound > 0:
            return (
                "gradients are applied as they arrive, to newer parameters than those they were computed on"
            )
        return None

    def shards(self, sizes: Sequence[int]) -> list[list[int]]:
        """Assign tensors to servers, and return the indices of each server's tensors in ascending order.

        Tensors are assigned in order of size, largest first, each to the server that then has the fewest elements.

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
        """Reject more servers than ranks, and gradient clipping by LAMB if no server receives whole gradients."""
        world_size = job.world_size
        most = world_size - 1 if self.dedicated else world_size
        if self.servers > most:
            reason = ", since one rank must be a worker" if self.dedicated else ""
            raise SpecError(
                f"strategy.servers={self.servers} is too many for world_size={world_size}{reason}; "
                f"use at most {most}"
            )
        workers = self.num_data_ranks(world_size)
        if self.backups >= workers:
            raise SpecError(
                f"strategy.backups={self.backups} leaves no worker of {workers} whose gradient is used; "
                f"use at most {workers - 1}"
            )
        norm = job.optimizer.settings.get("max_grad_norm", "off")
        if self.servers > 1 and not self.clips_at_servers and norm != "off":
            raise SpecError(
                f"optimizer.max_grad_norm={norm} needs the whole gradient, but with servers={self.servers} and "
                f"{f'backups={self.backups}' if self.backups else f'mode={self.mode!r}'} each server sees only a part; "
                f"use max_grad_norm='off' with clip_norm={norm}, or servers=1"
            )

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return the bytes of one push and one pull per worker; a worker and a server on the same rank send none."""
        remote = len(self.workers(world_size)) - (0 if self.dedicated else 1)
        return 2.0 * remote * gradient_bytes

    def activations(self, step: JobStep) -> list[float] | None:
        """Return the activation bytes of each rank; 0 for dedicated servers."""
        saved = super().activations(step)
        workers = self.workers(step.world_size)
        return saved and [held * (rank in workers) for rank, held in enumerate(saved)]

    @property
    def updating(self) -> tuple[int, ...]:
        """Ranks that run the optimizer: the ranks of the servers."""
        return tuple(range(self.servers))

    def work(self, step: JobStep) -> list[Work]:
        """Return the work of each rank: 1 for workers, 0 for dedicated servers. Server threads are not counted."""
        workers = self.workers(step.world_size)
        return [Work(step.slow(rank) * (rank in workers)) for rank in range(step.world_size)]

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of one push and one pull per worker, including headers and the norms that servers sum.

        With `backups`, this is the maximum, because workers skip steps that ended without their gradients. Workers that
        share gradients may compute, and send, any number of the gradients of a step; one per worker is assumed.
        """
        from shardscope.analytic.communication.parameter_server import parameter_server_traffic

        pushed, pulled, sums = self._sizes(step)
        found = parameter_server_traffic(pushed, pulled, step.world_size, dedicated=self.dedicated, sums=sums)
        most = step.job.num_data_ranks if self.shares_gradients else int(self.backups > 0)
        if not most:
            return found
        return {
            name: sent._replace(bounds=(0 * sent.bytes, most * sent.bytes)) for name, sent in found.items()
        }

    def _sizes(self, step: JobStep) -> tuple[list[int], list[int], int]:
        """Return the bytes that a worker pushes to each server and pulls from it, and the number of norms to sum."""
        sizes, now, job = [row.num_elements for row in step.trained], step.compression, step.job
        held = [sum(sizes[index] for index in shard) for shard in self.shards(sizes)]
        pulled = [count * step.element_bytes for count in held]
        pushed = pulled
        if isinstance(now, PackedCompression):
            pushed = [now.packet_bytes(count) for count in held]
        norms = job.optimizer.norm_sums([len(row.shape) for row in step.trained])
        return (
            pushed,
            pulled,
            int(norms.of_gradient + (job.clip_norm is not None and self.clips_at_servers)),
        )

    def plan(self, step: JobStep) -> StepPlan:
        """Return the pushes after the backward pass, and the pulls after the servers' update."""
        from shardscope.analytic.communication.plan import StepPlan
        from shardscope.analytic.communication.server_plan import server_exchanges

        pushed, pulled, sums = self._sizes(step)
        workers = self.workers(step.world_size)
        exchanges = server_exchanges(pushed, pulled, workers, sums=sums, micro_batches=step.micro_batches)
        return StepPlan(exchanges, updating=self.updating)

    def arrangement(self, world_size: int) -> Arrangement:
        """Return a star with the servers in the middle."""
        return Arrangement("star", tuple(range(self.servers)))

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes on each rank: a model copy, gradients on workers, and the states of shards on servers."""
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
