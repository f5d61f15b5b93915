"""A parameter server, which holds a shard of the parameters and an optimizer for it, and serves the workers.

Each remote worker is served by a separate thread, so that a dead worker is noticed at once: when a rank exits, gloo
ends waits for messages from this rank, but not waits for a message from any rank. A worker on the server's own rank
passes its gradient in memory. The thread that receives the last gradient needed for an update performs it, holding the
server's only lock. If a thread fails, its error is stored and ends all waits of the process; the main thread raises it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardscope.methods.strategies.parameter_server import ParameterServer
from shardscope.methods.strategies.parameter_server._admission import admission_of
from shardscope.methods.strategies.parameter_server._torch_messages import (
    TO_SERVER,
    TO_WORKER,
    AnswerKind,
    MessageBuffer,
    MessageKind,
    MessageLink,
    Shard,
    wait_for,
)
from shardscope.methods.strategies.parameter_server._torch_pushes import Pushes
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.flat import copy_tensors_
from shardscope.training.meter import OBSERVING
from shardscope.training.optim import TrainedParameters, built_by
from shardscope.training.sharding import ReduceSquares, clip_grad_norm_

Header = tuple[int, float, float]


class ParameterShardServer:
    """Server that holds a shard of the parameters, and applies gradients to it as they arrive.

    Args:
        job: The job to train.
        context: The rank context of the server.
        shard: The server's tensors; their current values are copied as initial values.
        link: Message link to the workers.
        on_update: Function called after each update, with True if the update was skipped.
        pushes: Format of the pushed gradients.
    """

    def __init__(
        self,
        job: Job,
        context: RankContext,
        shard: Shard,
        link: MessageLink,
        on_update: Callable[[bool], None],
        *,
        pushes: Pushes,
    ) -> None:
        assert isinstance(job.strategy, ParameterServer)
        self.job, self.context, self.spec, self.shard, self.link = job, context, job.strategy, shard, link
        self.workers = self.spec.workers(context.world_size)
        self.on_update, self.pushes = on_update, pushes
        self.message = MessageBuffer(shard.num_elements, shard.dtype)
        self.flat = self.message.payload.to(context.device)  # on a CPU, the message's own payload
        self.total = torch.zeros(shard.num_elements, dtype=shard.dtype)
        self.gradient = self.total.to(context.device)
        self.module = _module_of(shard, self.flat)
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in shard.names]
        self.set_parameters(shard.parameters)
        parameters = TrainedParameters(self.module.named_parameters(), reduce_grad_square=self._reduce_square)
        self.optimizer = built_by(job.optimizer, parameters)
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]

        self.state = threading.Condition()
        needed = self.spec.num_used(context.world_size) if self.spec.backups else None
        self.admission = admission_of(self.spec.bound, needed)
        self.clocks = dict.fromkeys(self.workers, 0)
        self.failure: BaseException | None = None
        self.ended = False
        self._inbox = {w: pushes.new_message(shard) for w in self.workers if w != context.rank}
        self._pushed: dict[int, tuple[int, bool, Tensor]] = {}
        self._stopped: dict[int, tuple[MessageKind, int]] = {}
        self._awaited: set[int] = set()
        self._sends: list[tuple[dist.Work, MessageBuffer]] = []
        self._answer: Header | None = None  # for the worker on this rank
        self._threads: list[threading.Thread] = []
        self._announced = self._joined = self._left = self._agreed = (
            0  # how many synchronisations this rank has announced, joined and left; and the step of the last one
        )
        self._limit: int | None = None  # the last step that may be served; None for no limit
        self._before: int | None = None  # the last step before those that are served
        self._num_taken = 0  # how many gradients have been applied or skipped since

    def set_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the server's parameters with `tensors`, one for each tensor of the shard."""
        copy_tensors_(self.parameters, tensors)
        self.message.payload.copy_(self.flat)

    @property
    def work_space(self) -> list[Tensor]:
        """Receive buffers for the pushes of remote workers, and buffers for unpacking them."""
        return [*(message.bytes for message in self._inbox.values()), *self.pushes.work_space]

    @property
    def _reduce_square(self) -> ReduceSquares | None:
        """Function that sums squares over synchronous servers; None if a single server receives whole gradients."""
        if self.spec.servers == 1 or not self.spec.clips_at_servers:
            return None
        return lambda square: self.link.sum_over(range(self.spec.servers), square)

    # Called by the main thread.

    def resume(self, step: int | None = None) -> None:
        """Start serving the workers, or continue after all ranks have synchronised.

        In a synchronous run, serve only up to `step`, so that no worker gets ahead of this rank. This matters because
        this rank may decide when all ranks stop, and because traffic that it receives counts towards its current step.
        """
        with self.state:
            self._limit = step if self.spec.is_lockstep else None
            self._left = self._joined
            if not self._threads:
                self._start()
            self.state.notify_all()

    def _start(self) -> None:
        self.admission.pull(self.workers)
        self._awaited |= set(self._inbox)
        for worker in self._inbox:
            name = f"server-{self.shard.index}-worker-{worker}"
            self._threads.append(
                threading.Thread(target=self._serve_worker, args=(worker,), name=name, daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def serve(self, step: int) -> bool:
        """Serve until `step` is finished. Return False if all workers ended before that."""
        self._before = step - 1 if self._before is None else self._before
        self.resume(step)
        self._wait(lambda: self.ended or self._finished_step >= step)
        return self._finished_step >= step

    @property
    def _finished_step(self) -> int:
        """Last step finished by the slowest worker; with backups, by the fastest; with shared gradients, by all
        together.
        """
        if self.spec.shares_gradients:
            assert self._before is not None
            return self._before + self._num_taken // len(self.workers)
        return (max if self.spec.backups else min)(self.clocks.values())

    def synchronize(self) -> int:
        """Serve until all workers pause or end, and return the step that all have finished; for dedicated servers."""
        self.resume()
        self._wait(lambda: self._announced > self._joined)
        return self.join_synchronization()

    def join_synchronization(self) -> int:
        """Join the synchronisation of all ranks, and return its step; serving stops until `resume` is called."""
        with self.state:
            self._joined += 1
            return self._agreed

    def answer(self) -> Header:
        """Wait for the server's answer to the worker on this rank, and return it."""
        self._wait(lambda: self._answer is not None)
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def close(self) -> None:
        """Join the threads and wait for the last messages; called after all workers have ended."""
        for thread in self._threads:
            thread.join()
        self._wait_for_sends()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.state:
            self.state.wait_for(lambda: self.failure is not None or condition())
            if self.failure is not None:
                raise self.failure

    # Called by the threads that serve workers.

    def _serve_worker(self, worker: int) -> None:
        try:
            if self.context.device.type == "cuda":
                torch.cuda.set_device(self.context.device)  # the current device is per thread
            while self._may_receive_from(worker):
                inbox = self._inbox[worker]
                who, patience = f"worker rank {worker}", self.job.timeout_s
                wait_for(self.link.post(inbox, worker, TO_SERVER), who, patience, patience)
                self.receive(worker, inbox)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            with self.state:
                self.failure = self.failure or error
                self.state.notify_all()
            self.link.abort()

    def _may_receive_from(self, worker: int) -> bool:
        """Wait until this worker's next message may be received; return False if no more messages will arrive."""

        def is_its_turn() -> bool:
            is_synchronizing = self._announced > self._left
            within = self._limit is None or self.clocks[worker] < self._limit
            return worker in self._awaited and not is_synchronizing and within

        with self.state:
            self.state.wait_for(lambda: self.ended or self.failure is not None or is_its_turn())
            return not self.ended and self.failure is None

    def receive(self, worker: int, message: MessageBuffer) -> None:
        """Process a worker's message, and perform any update that is due, or announce that all ranks will synchronise.

        The payload of a push is stored until its gradient is applied.

        Args:
            worker: Rank of the worker.
            message: The message; see `MessageKind`.
        """
        kind, step, finite = message.read()
        is_remote = worker != self.context.rank
        if is_remote:
            payload = message.payload.numel() * message.payload.element_size()
            name = "server_push" if kind == MessageKind.PUSH else None
            self.link.received(name, worker, payload, step=MessageKind(kind).traffic_step(int(step)))
        with self.state:
            self._awaited.discard(worker)
            if kind == MessageKind.PUSH:
                self._pushed[worker] = int(step), bool(finite), message.payload
                self._admit(worker, int(step))
            else:
                self._stopped[worker] = MessageKind(kind), int(step)
                self.clocks[worker] = int(step)
                self.admission.stop_computing(worker)
            if self.admission.is_due:
                self._apply()
            self._answer_stopped_workers()
            self.state.notify_all()

    # Updates.

    def _admit(self, worker: int, step: int) -> None:
        """Keep the gradient of a worker for an update, or drop it if it arrives after the update of its step."""
        if not self.admission.is_late(step):
            self.admission.push(worker)
            return
        self._wait_for_sends()
        self.clocks[worker] = step
        self._answer_pushes([worker], (AnswerKind.DROPPED, float(self._finished_step), 0.0))

    def _apply(self) -> None:
        workers = sorted(self.admission.held)
        self._wait_for_sends()
        skipped = not all(self._pushed[worker][1] for worker in workers)
        norm = 0.0 if skipped else self._update(workers)
        step = max(self._pushed[worker][0] for worker in workers)
        update = self.admission.take(applied=not skipped, step=step)
        self._num_taken += len(workers)
        self.clocks |= {worker: self._pushed[worker][0] for worker in workers}
        if not skipped:
            self.context.events.emit(
                "update", step=self.admission.version, workers=update.workers, staleness=update.staleness,
                server=self.shard.index, clocks=dict(self.clocks),
            )  # fmt: skip
        self.on_update(skipped)
        self._answer_pushes(workers, (AnswerKind.DONE, norm, float(skipped)))

    def _update(self, workers: list[int]) -> float:
        """Apply the mean of these workers' gradients; return the norm of the mean if the server clips it, else 0."""
        with self.context.meter.update_span(self.optimizer, "server_update"):
            pushed = {worker: (self._pushed[worker][0], self._pushed[worker][2]) for worker in workers}
            self.pushes.mean_(self.shard, pushed, self.total)
            if self.gradient is not self.total:
                self.gradient.copy_(self.total)
            self._set_rates(workers)
            for parameter, gradient in zip(self.parameters, self.shard.views(self.gradient), strict=True):
                parameter.grad = gradient
            norm = 0.0
            if self.job.clip_norm is not None and self.spec.clips_at_servers:
                norm = float(
                    clip_grad_norm_(self.parameters, self.job.clip_norm, reduce_square=self._reduce_square)
                )
            self.optimizer.step()
            if self.flat.device != self.message.payload.device:
                self.message.payload.copy_(self.flat)
        return norm

    def _set_rates(self, workers: list[int]) -> None:
        """Set the learning rates: with m workers, each gradient adds 1/m of the scheduled rate at its worker's step.

        With backup workers, the gradients of an update represent all workers, and their rates add up to the whole rate.
        """
        job = self.job
        factors = [job.lr_schedule.factor(self._pushed[worker][0], job.steps) for worker in workers]
        count = len(workers if self.spec.backups else self.workers)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * (sum(factors) / count)

    def _answer_pushes(self, workers: list[int], header: Header) -> None:
        """Answer the pushes of these workers with the newest parameters."""
        self.message.write(*header)
        for worker in workers:
            if worker != self.context.rank:
                self._send(worker, self.message, "server_pull", step=self._pushed[worker][0])
        self.admission.pull(workers)
        if self.context.rank in workers:  # this worker is waiting, so its parameters may be overwritten
            copy_tensors_(self.shard.parameters, self.shard.views(self.message.payload))
            self._answer = (
                header  # last, so that the worker continues only after this step's messages are counted
            )

    def _send(
        self, worker: int, message: MessageBuffer, name: str | None = None, *, step: int = OBSERVING
    ) -> None:
        self._sends.append((self.link.send(message, worker, TO_WORKER, name, step=step), message))
        self._awaited.add(worker)

    def _wait_for_sends(self) -> None:
        """Wait until all sends are done, because parameters must not change while they are sent."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    # Synchronisation of all ranks.

    def _answer_stopped_workers(self) -> None:
        """Answer all workers if all pause or all end; otherwise, if any worker ends, answer the paused workers."""
        kinds = {kind for kind, _ in self._stopped.values()}
        if len(self._stopped) == len(self.workers) and len(kinds) == 1:
            self._agreed = min(step for _, step in self._stopped.values())
            self._announced += 1
            self.ended = kinds == {MessageKind.END}
            self._release(list(self._stopped), (AnswerKind.SYNCHRONIZED, float(self._agreed), 0.0))
            self.admission.pull([] if self.ended else self.workers)
        elif MessageKind.END in kinds:
            pausing = [worker for worker, (kind, _) in self._stopped.items() if kind == MessageKind.PAUSE]
            self._release(pausing, (AnswerKind.WORKER_ENDS, 0.0, 0.0))

    def _release(self, workers: list[int], header: Header) -> None:
        for worker in workers:
            del self._stopped[worker]
            if worker == self.context.rank:
                self._answer = header
            else:
                self._send(worker, MessageBuffer.of(*header))


def _module_of(shard: Shard, flat: Tensor) -> nn.Module:
    """Return a module that holds the shard's tensors under their own names, as views of `flat`."""
    root = nn.Module()
    for name, value in zip(shard.names, shard.views(flat), strict=True):
        *path, last = name.split(".")
        home = root
        for part in path:
            if part not in home._modules:  # noqa: SLF001 - get_submodule raises instead
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        home.register_parameter(last, nn.Parameter(value))
    return root
