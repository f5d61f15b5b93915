"""Payload of a worker's push: its gradients, uncompressed or packed.

Workers and servers both use these classes. A worker writes the gradients of a shard to a message, and the server
averages the gradients from the messages of several workers. With compression, the server unpacks the packets, while
each worker keeps its residual and adds it to its next gradient. A worker on a server's rank packs its gradients like
all other workers, so that the placement of servers does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardscope.methods.strategies.parameter_server._torch_messages import MessageBuffer, Shard
from shardscope.training.compression import Bucket, Carrier, Compressor
from shardscope.training.flat import copy_tensors_

Pushed = tuple[int, Tensor]
"""A worker's step and the payload of its push."""


class Pushes:
    """Format of pushes without compression: the payload contains the gradients of a shard."""

    def new_message(self, shard: Shard) -> MessageBuffer:
        """Allocate a message for a push to the server of `shard`."""
        return MessageBuffer(shard.num_elements, shard.dtype)

    def write(self, shard: Shard, gradients: Sequence[Tensor], step: int, payload: Tensor) -> None:
        """Write the shard's gradients of `step` into the payload of a message from `new_message`."""
        copy_tensors_(shard.views(payload), gradients)

    def mean_(self, shard: Shard, pushed: Mapping[int, Pushed], out: Tensor) -> None:
        """Write the mean of the pushed gradients to `out`; the gradients are added in the order of the workers' ranks.

        Args:
            shard: The server's shard.
            pushed: Step and payload of each worker's push.
            out: Flat tensor for the mean.
        """
        for i, worker in enumerate(sorted(pushed)):
            payload = pushed[worker][1]
            _ = out.add_(payload) if i else out.copy_(payload)
        out.div_(len(pushed))

    @property
    def work_space(self) -> list[Tensor]:
        """Buffers kept between pushes, in addition to the messages."""
        return []


@dataclass
class PackedPushes(Pushes):
    """Format of pushes with compression: the payload is one packet with the gradients of a shard.

    Args:
        compressor: The compressor of this worker or server.
        carrier: Transport of compressed values, of which only the seed, this rank's number and the meter are used.
    """

    compressor: Compressor
    carrier: Carrier
    _flats: dict[int, Tensor] = field(default_factory=dict)

    def new_message(self, shard: Shard) -> MessageBuffer:
        return MessageBuffer(self.compressor.num_bytes(shard.num_elements), torch.uint8)

    def write(self, shard: Shard, gradients: Sequence[Tensor], step: int, payload: Tensor) -> None:
        flat = self._flat(shard)
        copy_tensors_(shard.views(flat), gradients)
        payload.copy_(self.compressor.pack(self._bucket(shard, flat, step), self.carrier))

    def mean_(self, shard: Shard, pushed: Mapping[int, Pushed], out: Tensor) -> None:
        flat = out if out.dtype == torch.float32 else self._flat(shard)
        for i, (worker, (step, payload)) in enumerate(sorted(pushed.items())):
            bucket = self._bucket(shard, flat, step)
            self.compressor.unpack(payload, bucket, self.carrier, sender=worker, add=i > 0)
        flat.div_(len(pushed))
        self.compressor.conclude_(flat, max(step for step, _ in pushed.values()))
        if flat is not out:
            out.copy_(flat)

    @property
    def work_space(self) -> list[Tensor]:
        return list(self._flats.values())

    def _flat(self, shard: Shard) -> Tensor:
        if shard.index not in self._flats:
            self._flats[shard.index] = torch.zeros(shard.num_elements, dtype=torch.float32)
        return self._flats[shard.index]

    @staticmethod
    def _bucket(shard: Shard, flat: Tensor, step: int) -> Bucket:
        return Bucket(shard.names, [parameter.shape for parameter in shard.parameters], flat, step)
