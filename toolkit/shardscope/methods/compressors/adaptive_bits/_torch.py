"""Integers of 2 to 8 bits in blocks, with bits reallocated between layers to reduce the error.

A layer means a module with its own tensors. Every few steps, each rank measures the mean gradient, and reallocates bits
within the budget. The mean gradient is the same on all ranks, so all ranks choose the same bits without communication.

Adjacent tensors with the same number of bits are packed as one piece. A rank's share of a bucket consists of its shares
of all pieces, and is sent as one packet. So a bucket takes only two phases, as if all its integers had the same width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardscope.methods.compressors.adaptive_bits import LEAST, MOST
from shardscope.methods.compressors.adaptive_bits._torch_plan import LayerStatistics, allocate
from shardscope.training.collectives.packets import packet_rows
from shardscope.training.compression.blocks import BlockInt
from shardscope.training.compression.bucket import Bucket
from shardscope.training.compression.compressor import Carrier, Compressor, check_finite
from shardscope.training.compression.memory import ErrorFeedback, Memory
from shardscope.training.compression.packed import share_size
from shardscope.training.compression.pieces import ADD, SET, SUBTRACT, put

_BITS, _SPREAD = "bits.", "spread."
_SCALE_BYTES = 4


def layer_of(name: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class BitPiece:
    """Adjacent tensors of a bucket with the same number of bits.

    Attributes:
        codec: Codec for this number of bits.
        start: Index of the first element in the bucket.
        stop: Index after the last element.
        share: Number of elements that each rank averages.
    """

    codec: BlockInt
    start: int
    stop: int
    share: int

    @property
    def num_bytes(self) -> int:
        """Packed size of a share, in bytes."""
        return self.codec.num_bytes(self.share)

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """Return the share of `rank` in a flat tensor with the layout of the bucket; the last shares may be shorter."""
        return flat[self.start : self.stop][rank * self.share : (rank + 1) * self.share]

    def encode(self, values: Tensor, packet: Tensor) -> None:
        """Pack a share; `values` are padded with zeros."""
        missing = self.share - values.numel()
        room = packet if _is_aligned(packet) else packet_rows(1, self.num_bytes)[0]
        self.codec.encode(pad(values, (0, missing)) if missing else values, room, 0)
        if room is not packet:
            packet.copy_(room)

    def unpack(self, packet: Tensor, out: Tensor, mode: int) -> None:
        """Unpack a share, and assign it to `out`, add it or subtract it (see `mode`); excess elements are dropped."""
        packet = packet if _is_aligned(packet) else packet.clone()
        if self.is_whole(out):
            self.codec.unpack(packet, out, mode)
            return
        values = torch.empty(self.share)
        self.codec.unpack(packet, values, SET)
        put(values[: out.numel()], out, mode)

    def is_whole(self, part: Tensor) -> bool:
        """Return whether a share can be unpacked directly into `part`."""
        return part.numel() == self.share and part.dtype == torch.float32


def _is_aligned(packet: Tensor) -> bool:
    """Return whether the float32 values in a packet are aligned in memory."""
    return packet.storage_offset() % _SCALE_BYTES == 0


class AdaptiveBitsCompressor(Compressor):
    """Compressor that exchanges integers in two phases, with 2 to 8 bits depending on the layer.

    Args:
        budget: Mean number of bits per element, not counting scales.
        update_every: Number of steps between measurements of the gradient.
        block: Number of elements that share a scale.
        feedback: Whether to add the compression error of a step to the next step's gradient.
    """

    name = "adaptive-bits"

    def __init__(self, budget: float, update_every: int, *, block: int, feedback: bool) -> None:
        self.budget, self.update_every, self.block = budget, update_every, block
        self.memory = ErrorFeedback() if feedback else Memory()
        self._codecs = {bits: BlockInt(bits, block) for bits in range(LEAST, MOST + 1)}
        self._codecs[LEAST].prepare()  # all codecs use the same loops
        self._bits: dict[str, int] = {}
        self._seen: dict[str, LayerStatistics] = {}
        self._sizes: dict[str, int] = {}

    @property
    def is_compiled(self) -> bool:
        return self._codecs[LEAST].is_compiled

    def begin_step(self, step: int) -> None:
        if self._seen:
            self._bits = allocate(self._seen, self.budget)
            self._sizes = {name: layer.size for name, layer in self._seen.items()}
            self._seen = {}

    def bits_of(self, name: str) -> int:
        """Return the bits per element of this tensor; before the first measurement, the budget rounded down."""
        return self._bits.get(layer_of(name), math.floor(self.budget))

    def mean_(self, bucket: Bucket, carrier: Carrier) -> None:
        check_finite(bucket, self.name)
        values = self.memory.before(bucket)
        pieces = self._pieces(bucket, carrier.world_size)
        with carrier.meter.span("codec", "encode"):
            outgoing = self._pack(pieces, values, carrier)
        incoming = carrier.packets.all_to_all(outgoing)
        with carrier.meter.span("codec", "encode"):
            own = self._average_share(pieces, incoming, values, bucket.flat, carrier)
        gathered = carrier.packets.all_gather(own)
        with carrier.meter.span("codec", "decode"):
            for rank, packet in enumerate(gathered):
                for piece, section in _sections(pieces, packet):
                    piece.unpack(section, piece.part(bucket.flat, rank), SET)
            if bucket.step % self.update_every == 0:
                self._measure(bucket)

    def _pieces(self, bucket: Bucket, world_size: int) -> list[BitPiece]:
        pieces, start = [], 0
        tensors = zip(bucket.names, bucket.sizes, strict=True)
        for bits, group in groupby(tensors, key=lambda tensor: self.bits_of(tensor[0])):
            members = list(group)
            size = sum(count for _, count in members)
            share = share_size(size, world_size, self.block)
            pieces.append(BitPiece(self._codecs[bits], start, start + size, share))
            start += size
        return pieces

    def _pack(self, pieces: list[BitPiece], values: Tensor, carrier: Carrier) -> Tensor:
        """Pack one packet per rank, and keep the compression error as residual."""
        packets = packet_rows(carrier.world_size, sum(piece.num_bytes for piece in pieces))
        for rank, packet in enumerate(packets):
            for piece, section in _sections(pieces, packet):
                part = piece.part(values, rank)
                piece.encode(part, section)
                if self.memory.is_needed:
                    piece.unpack(section, part, SUBTRACT)
        return packets

    def _average_share(
        self, pieces: list[BitPiece], incoming: Tensor, values: Tensor, scratch: Tensor, carrier: Carrier
    ) -> Tensor:
        """Average this rank's share over all ranks, and pack the mean; its compression error stays in the residual."""
        own = packet_rows(1, incoming.shape[1])[0]
        for k, (piece, place) in enumerate(_sections(pieces, own)):
            there = piece.part(scratch, carrier.rank)  # its old values have been packed
            mean = there if piece.is_whole(there) else torch.empty(piece.share)
            for rank, packet in enumerate(incoming):
                piece.unpack(_sections(pieces, packet)[k][1], mean, ADD if rank else SET)
            mean.div_(carrier.world_size)
            piece.encode(mean, place)
            if self.memory.is_needed:
                part = piece.part(values, carrier.rank)
                piece.unpack(place, mean, SUBTRACT)
                part.add_(mean[: part.numel()], alpha=carrier.world_size)
        return own

    def _measure(self, bucket: Bucket) -> None:
        for name, values in bucket.views(bucket.flat).items():
            layer, size = layer_of(name), values.numel()
            before = self._seen.get(layer, LayerStatistics(0, 0.0))
            self._seen[layer] = LayerStatistics(
                before.size + size, before.spread + spread_of(values, self.block)
            )

    @property
    def plan(self) -> dict[str, int]:
        return dict(self._bits)

    @property
    def memories(self) -> Sequence[Memory]:
        return (self.memory,)

    @property
    def figures(self) -> dict[str, float]:
        norms = {f"{kind}_norm": kept.norm for kind, kept in self.memory.kept.items()}
        bits = {f"{_BITS}{layer}": float(bits) for layer, bits in self._bits.items()}
        return {**norms, "bits": self.mean_bits, **bits}

    @property
    def mean_bits(self) -> float:
        """Mean number of bits per element."""
        if not self._bits:
            return math.floor(self.budget)
        total = sum(self._sizes[name] * bits for name, bits in self._bits.items())
        return total / sum(self._sizes.values())

    @property
    def work_space(self) -> list[Tensor]:
        return [flat for kept in self.memory.kept.values() for flat in kept.tensors]

    def state_dict(self) -> dict[str, Tensor]:
        bits = {f"{_BITS}{layer}": torch.tensor([bits, self._sizes[layer]])
                for layer, bits in self._bits.items()}  # fmt: skip
        seen = {
            f"{_SPREAD}{name}": torch.tensor([layer.size, layer.spread], dtype=torch.float64)
            for name, layer in self._seen.items()
        }
        return {**self.memory.state_dict(), **bits, **seen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.memory.load_state_dict(state)
        known = _under(_BITS, state)
        self._bits = {name: int(bits) for name, (bits, _) in known.items()}
        self._sizes = {name: int(size) for name, (_, size) in known.items()}
        self._seen = {
            name: LayerStatistics(int(size), float(spread))
            for name, (size, spread) in _under(_SPREAD, state).items()
        }
        if self.mean_bits > self.budget:  # from a larger budget: use equal bits until the next measurement
            self._bits, self._sizes = {}, {}


def spread_of(values: Tensor, block: int) -> float:
    """Return the sum over all blocks of the squared largest magnitude times the number of elements in the block.

    The sum is rounded only once, so it does not depend on a rank's number of threads.
    """
    flat = values.reshape(-1).float().abs()
    missing = -flat.numel() % block
    largest = (pad(flat, (0, missing)) if missing else flat).view(-1, block).amax(dim=1).double()
    counts = torch.full_like(largest, block)
    counts[-1:] -= missing
    return math.fsum(largest.square_().mul_(counts).tolist())


def _sections(pieces: list[BitPiece], packet: Tensor) -> list[tuple[BitPiece, Tensor]]:
    """Return each piece with its section of a packet."""
    return list(zip(pieces, packet.split([piece.num_bytes for piece in pieces]), strict=True))


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
