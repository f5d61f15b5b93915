"""A worker's client of the parameter servers, which sends requests to all servers and waits for all answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.methods.strategies.parameter_server._torch_messages import (
    TO_SERVER,
    TO_WORKER,
    AnswerKind,
    MessageBuffer,
    MessageKind,
    MessageLink,
    Shard,
    SilentPeer,
    wait_for,
)
from shardscope.methods.strategies.parameter_server._torch_pushes import Pushes
from shardscope.methods.strategies.parameter_server._torch_server import Header, ParameterShardServer
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.flat import copy_tensors_

_MAX_PAUSE_S = 86400.0
"""Maximum time in seconds that a worker that pauses or ends waits for slower workers. Servers detect a hanging worker
much earlier: they fail if it sends nothing for `timeout_s`. A worker waits for the answer to a push for twice this
`timeout_s`."""


class Exchanged(NamedTuple):
    """What servers did with the gradients of a step.

    Attributes:
        norm: Norm of the mean gradient if servers clip it, else 0.
        skipped: Whether any server skipped the update.
        dropped: Whether all servers dropped the gradients, because they arrived after the update of the step.
        reached: The last step that all servers have finished; after this worker's step if gradients were dropped.
    """

    norm: float
    skipped: bool
    dropped: bool
    reached: int


class Client:
    """Client that pushes gradients to the servers and pulls parameters from them.

    Args:
        job: The job to train.
        context: The rank context of the worker.
        shards: The worker's own parameters, grouped by server.
        link: Message link to the servers.
        local: The server on this rank, if any.
        pushes: Format of the pushed gradients.
    """

    def __init__(
        self,
        job: Job,
        context: RankContext,
        shards: Sequence[Shard],
        link: MessageLink,
        local: ParameterShardServer | None,
        *,
        pushes: Pushes,
    ) -> None:
        self.context, self.shards, self.link, self.local = context, shards, link, local
        self.pushes = pushes
        self._outbox = [pushes.new_message(shard) for shard in shards]
        self._inbox = {
            s: MessageBuffer(shard.num_elements, shard.dtype)
            for s, shard in enumerate(shards)
            if s != context.rank
        }
        self._timeout_s = job.timeout_s

    def exchange(self, step: int, *, finite: bool) -> Exchanged:
        """Push the gradients of `step`, wait until they have been applied or dropped, and pull the new parameters.

        Args:
            step: Number of the step.
            finite: Whether all gradients are finite; if not, servers skip the update.

        Raises:
            SpecError: A parameter has no gradient.
        """
        for shard, message in zip(self.shards, self._outbox, strict=True):
            gradients = _gradients(shard)
            if finite:  # otherwise the servers ignore the payload
                self.pushes.write(shard, gradients, step, message.payload)
        pulled = sum(shard.num_elements * shard.dtype.itemsize for shard in self.shards)
        pushed = sum(message.payload.numel() * message.payload.element_size() for message in self._outbox)
        with self.context.meter.span("communication", "server_exchange", pushed + pulled):
            answers = self._request(MessageKind.PUSH, step, finite=finite)
            for s, inbox in self._inbox.items():  # the server on this rank has already written its parameters
                copy_tensors_(self.shards[s].parameters, self.shards[s].views(inbox.payload))
        used = [answer for answer in answers if answer[0] != AnswerKind.DROPPED]
        reached = [int(value) if kind == AnswerKind.DROPPED else step for kind, value, _ in answers]
        return Exchanged(
            norm=used[0][1] if used else 0.0,
            skipped=any(skipped for _, _, skipped in used),
            dropped=not used,
            reached=min(reached),
        )

    @property
    def work_space(self) -> list[Tensor]:
        """Send and receive buffers for each server."""
        messages = [message.bytes for message in [*self._outbox, *self._inbox.values()]]
        return [*messages, *self.pushes.work_space]

    def pause_or_end(self, kind: MessageKind, step: int) -> int | None:
        """Pause or end after `step`, and wait until all other workers pause or end as well.

        Returns:
            The step that all workers have finished; None if this worker pauses and another worker ends.
        """
        answers = self._request(kind, step)
        if answers[0][0] != AnswerKind.SYNCHRONIZED:
            return None
        if self.local is not None:
            self.local.join_synchronization()
        return int(answers[0][1])

    def _request(self, kind: MessageKind, step: int, *, finite: bool = True) -> list[Header]:
        """Send the same request to all servers, and return their answers."""
        name, booked = "server_push" if kind == MessageKind.PUSH else None, kind.traffic_step(step)
        for message in self._outbox:
            message.write(kind, step, finite)
        receives = {s: self.link.post(inbox, s, TO_WORKER) for s, inbox in self._inbox.items()}
        sends = [self.link.send(self._outbox[s], s, TO_SERVER, name, step=booked) for s in self._inbox]
        try:
            return self._answers(kind, step, receives, sends)
        except (RuntimeError, SilentPeer) as error:
            if self.local is not None and self.local.failure is not None:
                raise self.local.failure from error  # that failure has aborted all waits of this process
            raise

    def _answers(
        self, kind: MessageKind, step: int, receives: dict[int, dist.Work], sends: list[dist.Work]
    ) -> list[Header]:
        rank = self.context.rank
        if self.local is not None:
            self.local.receive(rank, self._outbox[rank])
        patience, name = (
            (2 * self._timeout_s, "server_pull") if kind == MessageKind.PUSH else (_MAX_PAUSE_S, None)
        )
        answers = []
        for s, shard in enumerate(self.shards):
            if s == rank and self.local is not None:
                answers.append(self.local.answer())
                continue
            wait_for(receives[s], f"server rank {s}", patience, self._timeout_s)
            num_bytes = self._inbox[s].payload.numel() * shard.dtype.itemsize
            self.link.received(name, s, num_bytes, step=kind.traffic_step(step))
            answers.append(self._inbox[s].read())
        for work in sends:
            work.wait()
        return answers


def _gradients(shard: Shard) -> list[Tensor]:
    gradients = []
    for name, parameter in zip(shard.names, shard.parameters, strict=True):
        if parameter.grad is None:
            raise SpecError(
                f"parameter {name!r} got no gradient, but servers need a gradient for each trained "
                "parameter; use it in the loss, or freeze it with requires_grad_(False)"
            )
        gradients.append(parameter.grad)
    return gradients
