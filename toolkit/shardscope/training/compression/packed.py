"""Methods that are a codec: three ways in which packets meet, with or without error feedback.

| way | what a rank sends of a bucket packed into P bytes, W ranks |
|---|---|
| added up, where packets allow it | what the strategy's all-reduce sends of P bytes |
| two-phase | 2 (W-1) packets of a W-th of the bucket: each rank collects its share from all, adds it up in float32, packs the mean again and sends it to all (Tang et al. 2021, 1-bit Adam; Wang et al. 2023, ZeRO++) |
| gather | (W-1) P: everyone receives all packets; grows with the ranks |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardscope.training.collectives.packets import packet_rows
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.compressor import Carrier, Compressor, refuse_not_finite, seed_of
from shardscope.training.compression.memory import ErrorFeedback, Memory


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Elements of each rank's share in the two-phase way: a W-th, rounded up to a multiple of `align`."""
    return -(-num_elements // (world_size * align)) * align


class Packed(Compressor):
    """A codec, what is remembered, and a way to meet.

    Args:
        name: Of the method, for errors.
        codec: Its codec.
        memory: Of this rank's own gradient.
        shares: Of this rank's share of the mean, which the two-phase way packs a second time.
        exchange: ``"two-phase"`` or ``"gather"``; not looked at where packets can be added up.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        memory: Memory | None = None,
        shares: Memory | None = None,
        exchange: str = "two-phase",
    ) -> None:
        self.name, self.codec, self.exchange = name, codec, exchange
        self.memory = Memory() if memory is None else memory
        self.shares = Memory() if shares is None else shares

    @classmethod
    def of(cls, name: str, codec: Codec, *, feedback: bool, exchange: str = "two-phase") -> Packed:
        """With error feedback on what is packed, on both sides, or with none."""
        if not feedback:
            return cls(name, codec, exchange=exchange)
        shares = ErrorFeedback("share") if exchange == "two-phase" and codec.summable is None else None
        return cls(name, codec, memory=ErrorFeedback(), shares=shares, exchange=exchange)

    def begin_step(self, step: int) -> None:
        self.codec.begin_step(step)

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        refuse_not_finite(bucket, self.name)
        values = self.memory.before(bucket)
        out = bucket.flat if bucket.flat.dtype == torch.float32 else torch.empty_like(values)
        if self.codec.summable is not None:
            self._sum(bucket, values, out, carrier)
        elif self.exchange == "gather":
            self._gather(bucket, values, out, carrier)
        else:
            self._two_phase(bucket, values, out, carrier)
        if out is not bucket.flat:
            bucket.flat.copy_(out)

    def scatter_mean(self, bucket: Bucket, carrier: Carrier, out: Tensor) -> None:
        refuse_not_finite(bucket, self.name)
        values = self.memory.before(bucket)
        share = values.numel() // carrier.world_size
        mean = out if out.dtype == torch.float32 else torch.empty(share)
        packets = self._pack(bucket, values, share, carrier)
        if self.codec.summable is None:
            self._add_up(carrier.packets.all_to_all(packets), mean, bucket, carrier, row=carrier.rank)
        else:
            assert carrier.scatter_sum is not None
            own = carrier.scatter_sum(self._scaled(packets, carrier).view(-1)).view(torch.uint8)
            self._unpack(own, mean, self._seed(bucket, carrier, carrier.rank), carrier)
        if mean is not out:
            out.copy_(mean)

    # The three ways to meet.

    def _sum(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        packets = self._pack(bucket, values, values.numel(), carrier)
        summed = carrier.sum_(self._scaled(packets, carrier).view(-1)).view(torch.uint8)
        self._unpack(summed, out, self._seed(bucket, carrier, 0), carrier)

    def _gather(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        own = self._pack(bucket, values, values.numel(), carrier)[0]
        self._add_up(carrier.packets.all_gather(own), out, bucket, carrier, row=0)

    def _two_phase(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        count, world_size = values.numel(), carrier.world_size
        share = share_size(count, world_size, self.codec.align)
        incoming = carrier.packets.all_to_all(self._pack(bucket, values, share, carrier))
        mean = torch.empty(share)
        self._add_up(incoming, mean, bucket, carrier, row=carrier.rank)
        gathered = carrier.packets.all_gather(self._pack_share(bucket, mean, carrier))
        for rank, packet in enumerate(gathered):
            piece = out[rank * share : (rank + 1) * share]
            whole = piece if piece.numel() == share else mean
            self._unpack(packet, whole, self._seed(bucket, carrier, world_size, rank), carrier)
            if whole is mean:
                piece.copy_(mean[: piece.numel()])

    # Packing and unpacking.

    def _pack(self, bucket: Bucket, values: Tensor, share: int, carrier: Carrier) -> Tensor:
        """Packets of all shares of `values`, [shares, bytes]; the memory learns what they leave out."""
        rows = list(_rows(values, share, 1 if share == values.numel() else carrier.world_size))
        packets = self._room(len(rows), share)
        with carrier.meter.span("codec", "encode"):
            for j, row in enumerate(rows):
                self.codec.encode(row, packets[j], self._seed(bucket, carrier, j))
            if self.memory.is_needed:
                back = torch.empty(len(rows), share)
                for j in range(len(rows)):
                    self.codec.decode(packets[j], back[j], self._seed(bucket, carrier, j))
                self.memory.after(bucket, values, back.view(-1)[: values.numel()])
        return packets

    def _room(self, count: int, share: int) -> Tensor:
        size = self.codec.num_bytes(share)
        if self.codec.summable is None:
            return packet_rows(count, size)
        return torch.empty(count * size, dtype=torch.uint8).view(count, size)  # to be added up as one tensor

    def _pack_share(self, bucket: Bucket, mean: Tensor, carrier: Carrier) -> Tensor:
        """The packet of this rank's share of the mean, which has a memory of its own."""
        own = Bucket([f"{bucket.names[0]}.share"], [mean.shape], mean, bucket.step)
        seed = self._seed(bucket, carrier, carrier.world_size)
        packet = packet_rows(1, self.codec.num_bytes(mean.numel()))[0]
        with carrier.meter.span("codec", "encode"):
            values = self.shares.before(own)
            self.codec.encode(values, packet, seed)
            if self.shares.is_needed:
                back = torch.empty_like(values)
                self.codec.decode(packet, back, seed)
                self.shares.after(own, values, back)
        return packet

    def _scaled(self, packets: Tensor, carrier: Carrier) -> Tensor:
        """Divided by the ranks before they are added up: half-precision sums would overflow earlier."""
        assert self.codec.summable is not None
        return packets.view(self.codec.summable).div_(carrier.world_size)

    def _unpack(self, packet: Tensor, out: Tensor, seed: int, carrier: Carrier) -> None:
        with carrier.meter.span("codec", "decode"):
            self.codec.decode(packet, out, seed)

    def _add_up(self, packets: Tensor, out: Tensor, bucket: Bucket, carrier: Carrier, *, row: int) -> None:
        """The mean of what all ranks packed as their share `row`, added in the order of the ranks."""
        with carrier.meter.span("codec", "decode"):
            for rank, packet in enumerate(packets):
                self.codec.decode(packet, out, self._seed(bucket, carrier, row, rank), add=rank > 0)
            out.div_(carrier.world_size)

    def _seed(self, bucket: Bucket, carrier: Carrier, row: int, rank: int | None = None) -> int:
        who = carrier.rank if rank is None else rank
        return seed_of(carrier.seed, bucket.step, bucket.names, None if self.codec.shared_seed else who) + row

    # What is kept.

    @property
    def figures(self) -> dict[str, float]:
        kept = {**self.memory.kept, **self.shares.kept}
        return {f"{kind}_norm": flats.norm for kind, flats in kept.items()}

    @property
    def work_space(self) -> list[Tensor]:
        return [
            flat
            for kept in (self.memory.kept, self.shares.kept)
            for flats in kept.values()
            for flat in flats.tensors
        ]

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.memory.state_dict(), **self.shares.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.memory.load_state_dict(state)
        self.shares.load_state_dict(state)


def _rows(values: Tensor, share: int, count: int) -> Iterator[Tensor]:
    """`count` shares of `values`; what is missing at the end is zero."""
    for j in range(count):
        row = values[j * share : (j + 1) * share]
        yield row if row.numel() == share else pad(row, (0, share - row.numel()))
