"""Parameter-server strategy: workers push gradients to one or several servers, and pull parameters from them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from shardscope.methods.strategies import parameter_server
from shardscope.methods.strategies.parameter_server._torch_client import Client
from shardscope.methods.strategies.parameter_server._torch_messages import (
    MessageKind,
    MessageLink,
    cut_into_shards,
)
from shardscope.methods.strategies.parameter_server._torch_pushes import PackedPushes, Pushes
from shardscope.methods.strategies.parameter_server._torch_server import ParameterShardServer
from shardscope.training.collectives.packets import Packets
from shardscope.training.compression import Carrier, Compressor, build_compressor
from shardscope.training.context import RankContext
from shardscope.training.flat import copy_tensors_
from shardscope.training.memory import Held
from shardscope.training.optim import LayerSignal, LayerwiseOptimizer
from shardscope.training.optim.state import NamedOptimizer
from shardscope.training.sharding import clip_grad_norm_, start_alike
from shardscope.training.strategies.base import LossFunction, MicroBatch, RankStrategy
from shardscope.training.strategies.step_result import StepResult


class ParameterServerRank(RankStrategy):
    """Strategy in which servers hold parameters and optimizers, and workers compute gradients on copies.

    The module of each rank holds a worker's copy of the parameters; a server stores its own parameters separately. At
    some points, such as before a checkpoint, all ranks synchronise: each server broadcasts its newest parameters, so
    that all copies are equal. In a synchronous run, copies are equal anyway, so this changes nothing. In all other
    runs, synchronising acts like an additional pull by each worker.
    """

    shares_state: ClassVar[bool] = False
    settings: parameter_server.ParameterServer

    def wrap(self, model: nn.Module) -> nn.Module:
        context = self.context
        assert context.group is not None
        self.link = MessageLink(context.group)
        self.shards = cut_into_shards(model, self.settings)
        start_alike(model)
        workers = self.settings.workers(context.world_size)
        self.buffers_from = workers[0]
        compressor = build_compressor(
            self.job
        )  # separate for the server, since its threads unpack while the worker packs
        self.server: ParameterShardServer | None = None
        if context.rank < self.settings.servers:
            shard = self.shards[context.rank]
            self.server = ParameterShardServer(
                self.job, context, shard, self.link, self._after_update, pushes=self._pushes(compressor)
            )
        self.client: Client | None = None
        if context.rank in workers:
            pushes = self._pushes(self.compressor)
            self.client = Client(self.job, context, self.shards, self.link, self.server, pushes=pushes)
        self.shared: SharedParts | None = None
        if self.settings.shares_gradients:
            self.shared = SharedParts.of(context, context.group, workers)
        self._is_settled = True
        self._ended_at: int | None = None
        self._reached = 0  # the last step that all servers have finished, as far as this worker knows
        return model

    def _pushes(self, compressor: Compressor | None) -> Pushes:
        if compressor is None:
            return Pushes()
        group = self.context.group
        assert group is not None
        carrier_sum = partial(group.sum_as, "packet_sum")
        self.carrier = Carrier(carrier_sum, Packets(group), self.context.meter, self.job.seed)
        return PackedPushes(compressor, self.carrier)

    @property
    def data_rank(self) -> int | None:
        workers = self.settings.workers(self.context.world_size)
        return workers.index(self.context.rank) if self.context.rank in workers else None

    @property
    def shares_parts(self) -> bool:
        return self.settings.shares_gradients

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build a placeholder for the trainer's learning rates; on a server, it shares the real optimizer's state."""
        front = torch.optim.SGD(self.parameters, lr=self.job.optimizer.lr)
        if self.server is not None:
            front.state = self.server.optimizer.state
        return front

    def layer_signals(self, optimizer: torch.optim.Optimizer) -> list[LayerSignal]:
        """Return the signals of a server's newest update, possibly for a different step; an empty list on workers."""
        server = self.server
        if server is None or not isinstance(server.optimizer, LayerwiseOptimizer):
            return []
        with server.state:
            return server.optimizer.layer_signals()

    def batch_parts(self, step: int) -> Iterator[int | None]:
        if self.shared is None or self.client is None:
            return super().batch_parts(step)
        return self.shared.of_step(step)

    def stops_before(self, step: int, *, asked: bool) -> bool:
        if self.server is None or self.client is not None or self.settings.is_lockstep:
            return asked
        return not self.server.serve(step)  # each worker checks the stop request by itself

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_function: LossFunction,
        optimizer: torch.optim.Optimizer,
    ) -> StepResult:
        number = self.context.meter.step
        self._is_settled = False
        if self.client is None:
            assert self.server is not None
            self.server.serve(number)
            return StepResult(None, None)
        if self.server is not None:
            self.server.resume(number)
        if self.settings.backups and number <= self._reached:
            return StepResult(None, None, dropped=True)
        optimizer.zero_grad(set_to_none=True)
        if self.compressor is not None:
            self.compressor.begin_step(number)
        loss = self._accumulate(micro_batches, loss_function)
        finite = self.precision.unscale([p.grad for p in self.parameters if p.grad is not None])
        norm = self._clip() if finite else None
        done = self.client.exchange(number, finite=finite)
        self._reached = done.reached
        if done.dropped:
            return StepResult(None, None, dropped=True)
        self.precision.follow(skipped=done.skipped)
        if self.job.clip_norm is not None and self.settings.clips_at_servers and not done.skipped:
            norm = done.norm
        return StepResult(loss, norm, done.skipped)

    def _clip(self) -> float | None:
        """Clip the worker's whole gradient before it is pushed, unless servers clip the mean."""
        if self.job.clip_norm is None or self.settings.clips_at_servers:
            return None
        return float(clip_grad_norm_(self.parameters, self.job.clip_norm))

    def _after_update(self, skipped: bool) -> None:
        if self.client is None:  # keep the loss scale in checkpoints equal to the workers'
            self.precision.follow(skipped=skipped)

    def synchronize(self, step: int, *, ending: bool = False) -> int | None:
        if self._ended_at is not None:
            return self._ended_at
        if self._is_settled and not ending:
            return step
        agreed = self._pause_or_end(step, ending=ending)
        if agreed is None:
            return None
        if ending:
            self._ended_at = agreed
        self._is_settled = True
        self._broadcast_parameters()
        return agreed

    def _pause_or_end(self, step: int, *, ending: bool) -> int | None:
        if self.client is None:
            assert self.server is not None
            return self.server.synchronize()
        if self.server is not None:
            self.server.resume()
        return self.client.pause_or_end(MessageKind.END if ending else MessageKind.PAUSE, step)

    def _broadcast_parameters(self) -> None:
        """Broadcast the servers' newest parameters to every rank."""
        for shard in self.shards:
            server = self.server if shard.index == self.context.rank else None
            flat = torch.empty(
                shard.num_elements, dtype=shard.parameters[0].dtype, device=self.context.device
            )
            if server is not None:
                flat.copy_(server.flat)
            dist.broadcast(flat, src=shard.index)
            copy_tensors_(shard.parameters, shard.views(flat))

    def close(self) -> None:
        self.synchronize(self.context.meter.step, ending=True)
        if self.server is not None:
            self.server.close()

    def held(self, optimizer: torch.optim.Optimizer) -> Held:
        """Return this rank's tensors by type of memory; a server adds its own tensors and its receive buffers."""
        # locked, since a server's threads create the optimizer state in the first update
        with nullcontext() if self.server is None else self.server.state:
            held = {kind: list(tensors) for kind, tensors in super().held(optimizer).items()}
        if self.server is not None:
            held["parameters"] += self.server.parameters
            held["gradients"] += [self.server.total, self.server.gradient]
            held["buffers"] += [*self.server.work_space, *getattr(self.server.optimizer, "work_space", ())]
        if self.client is not None:
            held["buffers"] += self.client.work_space
        return held

    @property
    def layout(self) -> str:
        return f"{self.settings.label} {self.context.world_size}"

    def named_optimizer(self, optimizer: torch.optim.Optimizer) -> NamedOptimizer | None:
        """Return a server's real optimizer, with the names of its tensors; None on a rank without a server."""
        server = self.server
        if server is None:
            return None
        return NamedOptimizer(server.optimizer, {p: name for name, p in server.module.named_parameters()})

    def load_checkpoint_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        super().load_checkpoint_state(state, optimizer)
        if self.server is not None:
            self.server.set_parameters(self.server.shard.parameters)
            optimizer.state = self.server.optimizer.state


@dataclass
class SharedParts:
    """One worker's view of the parts of a run's data that workers share: each worker takes the next untaken part.

    The gradients of a run are numbered from 0, in the order of steps and, within a step, of the parts of its global
    batch. The next number is an atomic counter in the process group's store. A worker takes its next number when it has
    finished a gradient, and so knows when it has finished its gradients of a step. All gradients below the lowest
    number that a worker has taken but not finished are finished, so ranks that synchronise after a step have finished
    exactly the gradients up to this step.

    Attributes:
        counter: Counter of the parts that workers have taken, not counting their first parts.
        worker: Index of this worker; for a rank that is not a worker, it is not used.
        num_workers: Number of workers, and of parts of each step.
    """

    counter: dist.Store
    worker: int
    num_workers: int
    _first: int = 0
    _next: int = -1

    @classmethod
    def of(cls, context: RankContext, group: dist.ProcessGroup, workers: range) -> SharedParts:
        """Return the parts of a new run; must be called by all ranks.

        A store may outlive ranks that a restart replaces, so each run uses a counter with a unique name.
        """
        name = torch.tensor([secrets.randbits(62)], device=context.device)
        dist.broadcast(name, src=0)
        store = dist.PrefixStore(f"shared-parts/{int(name)}", group.get_group_store())
        worker = workers.index(context.rank) if context.rank in workers else 0
        return cls(store, worker, len(workers))

    def of_step(self, step: int) -> Iterator[int]:
        """Yield the parts of `step` that this worker takes, one after another; no part if other workers have taken all.

        The first call is for the first step of the run, of which each worker takes one part.
        """
        if self._next < 0:
            self._first = (step - 1) * self.num_workers
            self._next = self._first + self.worker
        while self._next < step * self.num_workers:
            yield self._next % self.num_workers
            taken: int = self.counter.add("taken", 1)
            self._next = self._first + self.num_workers + taken - 1
