"""Compressor for methods that define a `Codec`: three ways to exchange packets, with or without error feedback.

A bucket is packed into P bytes; W is the number of ranks.

| exchange | how the mean is computed | bytes that each rank sends |
|---|---|---|
| sum, if packets can be summed | the strategy's all-reduce, on the packets | those of an all-reduce of P bytes |
| two-phase | each rank receives its share of the bucket from all ranks, averages it in float32, packs the mean and sends it to all ranks (Tang et al. 2021, 1-bit Adam; Wang et al. 2023, ZeRO++) | 2 (W-1) P/W |
| gather | each rank receives the packets of all ranks and averages them | (W-1) P |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardscope.training.collectives.packets import packet_rows
from shardscope.training.compression.bucket import PADDING, Bucket
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.compressor import (
    Carrier,
    Compressor,
    check_finite,
    check_range,
    seed_of,
)
from shardscope.training.compression.memory import ErrorFeedback, Memory

_SHARE = "share."
_SEED_STRIDE = 7919
"""Difference between the seeds of successive exchanges of a bucket within one step."""


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Return the number of elements in each rank's share of a bucket in the two-phase exchange.

    It is the bucket's size divided by the number of ranks, rounded up to a multiple of `align`.
    """
    return -(-num_elements // (world_size * align)) * align


class Packed(Compressor):
    """Compressor that packs gradients with a codec.

    Args:
        name: The method's name, for error messages.
        codec: The method's codec.
        memory: Keeps the residuals of this rank's own gradient; by default, none are kept.
        shares: Keeps the residuals of this rank's share of the mean, which the two-phase exchange packs a second time;
            by default, none are kept.
        exchange: ``"two-phase"`` or ``"gather"``; ignored if packets can be summed.
        carries_overflow: Whether to pass on NaN and infinities instead of raising an error.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        *,
        memory: Memory | None = None,
        shares: Memory | None = None,
        exchange: str = "two-phase",
        carries_overflow: bool = False,
    ) -> None:
        self.carries_overflow = carries_overflow
        self.name, self.codec, self.exchange = name, codec, exchange
        self.memory = Memory() if memory is None else memory
        self.shares = Memory() if shares is None else shares
        codec.prepare()

    @classmethod
    def of(cls, name: str, codec: Codec, *, feedback: bool, exchange: str = "two-phase") -> Packed:
        """Build a compressor without error feedback, or with error feedback for both gradients and shares."""
        if not feedback:
            return cls(name, codec, exchange=exchange)
        shares = ErrorFeedback("share") if exchange == "two-phase" and codec.summable is None else None
        return cls(name, codec, memory=ErrorFeedback(), shares=shares, exchange=exchange)

    @property
    def is_compiled(self) -> bool:
        return self.codec.is_compiled

    def begin_step(self, step: int) -> None:
        self.codec.begin_step(step)

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        self._watch_input(bucket)
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
        self._watch_input(bucket)
        values = self.memory.before(bucket)
        share = values.numel() // carrier.world_size
        mean = out if out.dtype == torch.float32 else torch.empty(share)
        if self.codec.summable is None:
            packets = self._pack(bucket, values, share, carrier.world_size, carrier)
            self._add_up(carrier.packets.all_to_all(packets), mean, bucket, carrier, row=carrier.rank)
        else:
            assert carrier.scatter_sum is not None
            packets = self._pack_summands(bucket, values, share, carrier.world_size, carrier)
            own = carrier.scatter_sum(packets.view(-1)).view(torch.uint8)
            self._unpack(own, mean, self._seed(bucket, carrier, carrier.rank), carrier)
            self._check_overflow(own, bucket.cut(mean, carrier.rank * share))
        if mean is not out:
            out.copy_(mean)

    def _watch_input(self, bucket: Bucket) -> None:
        if not self.carries_overflow:
            check_finite(bucket, self.name)

    def _check_overflow(self, packed: Tensor, unpacked: Bucket) -> None:
        """Raise `NotFinite` if packing or summing has turned finite gradients into infinities.

        The check reads the packet if that is in float32, else the unpacked values, because torch sums 16-bit dtypes
        slowly.
        """
        if not self.codec.may_overflow or self.carries_overflow:
            return
        is_float = self.codec.summable == torch.float32
        if not torch.isfinite((packed.view(torch.float32) if is_float else unpacked.flat).sum()):
            check_range(unpacked, self.name, self.codec.out_of_range)

    # Methods for sending a packet from one rank to another.

    def num_bytes(self, num_elements: int) -> int:
        return self.codec.num_bytes(num_elements)

    def pack(self, bucket: Bucket, carrier: Carrier) -> Tensor:
        self._watch_input(bucket)
        values = self.memory.before(bucket)
        packet = self._pack(bucket, values, values.numel(), 1, carrier)[0]
        if self.codec.may_overflow and not self.carries_overflow:
            back = torch.empty_like(values)
            self.codec.decode(packet, back, self._seed(bucket, carrier, 0))
            self._check_overflow(packet, replace(bucket, flat=back))
        return packet

    def unpack(
        self, packet: Tensor, bucket: Bucket, carrier: Carrier, *, sender: int, add: bool = False
    ) -> None:
        with carrier.meter.span("codec", "decode"):
            self.codec.decode(packet, bucket.flat, self._seed(bucket, carrier, 0, sender), add=add)

    def forget(self) -> None:
        self.memory, self.shares = Memory(), Memory()

    # The three ways to exchange packets.

    def _sum(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        packets = self._pack_summands(bucket, values, values.numel(), 1, carrier)
        summed = carrier.sum_(packets.view(-1)).view(torch.uint8)
        self._unpack(summed, out, self._seed(bucket, carrier, 0), carrier)
        self._check_overflow(summed, replace(bucket, flat=out))

    def _gather(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        own = self._pack(bucket, values, values.numel(), 1, carrier)[0]
        self._add_up(carrier.packets.all_gather(own), out, bucket, carrier, row=0)

    def _two_phase(self, bucket: Bucket, values: Tensor, out: Tensor, carrier: Carrier) -> None:
        count, world_size = values.numel(), carrier.world_size
        share = share_size(count, world_size, self.codec.align)
        incoming = carrier.packets.all_to_all(self._pack(bucket, values, share, world_size, carrier))
        pieces = [out[rank * share : (rank + 1) * share] for rank in range(world_size)]
        mean = _full_share(
            pieces[carrier.rank], share
        )  # `out` may be overwritten: its values are packed already
        self._add_up(incoming, mean, bucket, carrier, row=carrier.rank)
        gathered = carrier.packets.all_gather(self._pack_share(bucket, mean, carrier))
        for rank, (packet, piece) in enumerate(zip(gathered, pieces, strict=True)):
            if piece.numel():
                whole = _full_share(piece, share)
                self._unpack(packet, whole, self._seed(bucket, carrier, world_size, rank), carrier)
                if whole is not piece:
                    piece.copy_(whole[: piece.numel()])

    # Packing and unpacking.

    def _pack(self, bucket: Bucket, values: Tensor, share: int, count: int, carrier: Carrier) -> Tensor:
        """Pack `values` as `count` shares of `share` elements each, and update the memory's residuals.

        Returns:
            The packets: a uint8 tensor of shape [count, bytes per share].
        """
        rows = list(_rows(values, share, count))
        packets = self._packet_buffer(len(rows), share)
        with carrier.meter.span("codec", "encode"):
            for j, row in enumerate(rows):
                self.codec.encode(row, packets[j], self._seed(bucket, carrier, j))
            if self.memory.is_needed:
                self._update_memory(bucket, values, packets, rows, carrier)
        return packets

    def _update_memory(
        self, bucket: Bucket, values: Tensor, packets: Tensor, rows: list[Tensor], carrier: Carrier
    ) -> None:
        """Pass the decoded packets to the memory, or, if it `keeps_values`, subtract them from `values` in place."""
        seeds = [self._seed(bucket, carrier, j) for j in range(len(rows))]
        if self.memory.keeps_values:
            for j, piece in enumerate(values.split(rows[0].numel()) if values.numel() else ()):
                self.codec.subtract(packets[j], rows[j], seeds[j])
                if rows[j].numel() != piece.numel():  # a separate row, padded with zeros
                    piece.copy_(rows[j][: piece.numel()])
            return
        back = torch.empty(len(rows), rows[0].numel())
        for packet, row, seed in zip(packets, back, seeds, strict=True):
            self.codec.decode(packet, row, seed)
        self.memory.after(bucket, values, back.view(-1)[: values.numel()])

    def _packet_buffer(self, count: int, share: int) -> Tensor:
        size = self.codec.num_bytes(share)
        if self.codec.summable is None:
            return packet_rows(count, size)
        return torch.empty(count * size, dtype=torch.uint8).view(count, size)  # to be summed as one tensor

    def _pack_share(self, bucket: Bucket, mean: Tensor, carrier: Carrier) -> Tensor:
        """Pack this rank's share of the mean for the second phase, with the residuals in `shares`."""
        own = bucket.cut(mean, carrier.rank * mean.numel())
        seed = self._seed(bucket, carrier, carrier.world_size)
        packet = packet_rows(1, self.codec.num_bytes(mean.numel()))[0]
        with carrier.meter.span("codec", "encode"):
            values = self.shares.before(own)
            self.codec.encode(values, packet, seed)
            if self.shares.keeps_values:
                self.codec.subtract(packet, values, seed)
            elif self.shares.is_needed:
                back = torch.empty_like(values)
                self.codec.decode(packet, back, seed)
                self.shares.after(own, values, back)
        return packet

    def _pack_summands(
        self, bucket: Bucket, values: Tensor, share: int, count: int, carrier: Carrier
    ) -> Tensor:
        """Return packets whose sum over all ranks is the packet of the mean, viewed in the dtype of the sum.

        Without error feedback, values are divided by the number of ranks before packing, so that a 16-bit dtype
        overflows only for larger values. Residuals must be in units of the gradient, so methods with error feedback
        divide after packing; their packets are in float32.
        """
        assert self.codec.summable is not None
        if self.memory.is_needed:
            packets = self._pack(bucket, values, share, count, carrier)
            return packets.view(self.codec.summable).div_(carrier.world_size)
        packets = self._pack(bucket, values.div_(carrier.world_size), share, count, carrier)
        return packets.view(self.codec.summable)

    def _unpack(self, packet: Tensor, out: Tensor, seed: int, carrier: Carrier) -> None:
        with carrier.meter.span("codec", "decode"):
            self.codec.decode(packet, out, seed)

    def _add_up(self, packets: Tensor, out: Tensor, bucket: Bucket, carrier: Carrier, *, row: int) -> None:
        """Decode the packets of all ranks for share `row`, add them in rank order, and write their mean to `out`."""
        with carrier.meter.span("codec", "decode"):
            for rank, packet in enumerate(packets):
                self.codec.decode(packet, out, self._seed(bucket, carrier, row, rank), add=rank > 0)
            out.div_(carrier.world_size)
            self.conclude_(out, bucket.step)

    def _seed(self, bucket: Bucket, carrier: Carrier, row: int, rank: int | None = None) -> int:
        who = carrier.rank if rank is None else rank
        seed = seed_of(carrier.seed, bucket.step, bucket.names, None if self.codec.shared_seed else who)
        return seed + row + _SEED_STRIDE * bucket.part

    # State kept between steps.

    @property
    def memories(self) -> Sequence[Memory]:
        return (self.memory, self.shares)

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

    def merge(self, states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Merge the states of all ranks as in the base class, and add the residuals of shares.

        Only one rank has the residual of each share, so it is not averaged but added to the merged gradient residual.
        """
        residuals: dict[str, Tensor] = {}

        def without_shares() -> Iterator[dict[str, Tensor]]:
            for state in states:
                residuals.update({name: tensor for name, tensor in state.items() if name.startswith(_SHARE)})
                yield {name: tensor for name, tensor in state.items() if not name.startswith(_SHARE)}

        merged = super().merge(without_shares())
        kind = next(iter(self.memory.kept), None)
        if kind is None:  # without feedback there are no residuals
            return merged
        for piece, tensor in residuals.items():
            name, _, start = piece.removeprefix(_SHARE).rpartition("@")
            residual = merged.get(
                f"{kind}.{name}"
            )  # None where this method cannot use another method's residual
            if start != PADDING and residual is not None:
                residual.view(-1)[int(start) :][: tensor.numel()] += tensor
        return merged

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.memory.load_state_dict(state)
        self.shares.load_state_dict(state)


def _full_share(piece: Tensor, share: int) -> Tensor:
    """Return a buffer of `share` elements: `piece` itself, or a new tensor if the piece is shorter (the last one)."""
    return piece if piece.numel() == share else torch.empty(share)


def _rows(values: Tensor, share: int, count: int) -> Iterator[Tensor]:
    """Yield `count` consecutive shares of `values`, padded with zeros at the end."""
    for j in range(count):
        row = values[j * share : (j + 1) * share]
        yield row if row.numel() == share else pad(row, (0, share - row.numel()))
