"""Base classes of methods that pack single elements or blocks of elements into bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec.compression import Collective, Compression, Meeting, Shapes
from shardscope.spec.method import required

if TYPE_CHECKING:
    from shardscope.spec.job import Job

Exchange = Literal["two-phase", "gather"]
"""How packets are exchanged. With ``two-phase``, each rank unpacks, averages and repacks its share of the elements, so
traffic per rank does not grow with the number of ranks. With ``gather``, every rank receives the packets of all ranks,
so traffic per rank grows with their number."""
Ratio = Annotated[float, Field(gt=0, le=1)]


class PackedCompression(Compression):
    """Base class of methods that pack gradients with a codec, with or without error feedback.

    Derive your own method from this class: define `name`, settings as fields with defaults, `packet_bytes` and `codec`.
    Two optional fields have a predefined meaning: ``feedback`` turns error feedback on or off, and ``exchange`` selects
    how packets are exchanged. Without these fields, no residual is kept, and packets are exchanged in two phases.
    """

    summed_width: ClassVar[int | None] = None
    """Bytes per value in a packet, if packets can be summed without unpacking; otherwise None."""

    @required
    def packet_bytes(self, num_elements: int) -> int:
        """Return the size in bytes of a packet that holds `num_elements` values."""
        raise NotImplementedError

    @required
    def codec(self) -> Any:
        """Return the `shardscope.training.compression.codec.Codec` that packs and unpacks."""
        raise NotImplementedError

    @property
    def align(self) -> int:
        """Alignment in elements: the size of each piece that is packed separately is a multiple of this number."""
        return 1

    def is_too_coarse(self) -> str:
        """Return the message for `diverges_because` in methods that are too coarse for gossip."""
        return (
            f"compression={self.name!r} cannot be combined with strategy='gossip': the compression error is larger "
            "than the difference that is sent; use 'sign', 'int4' or 'int8'"
        )

    @property
    def meets(self) -> Meeting:
        """How packets are exchanged: ``sum`` if they can be summed without unpacking, else as set by `exchange`."""
        if self.summed_width is not None:
            return "sum"
        return "gather" if getattr(self, "exchange", None) == "gather" else "two-phase"

    def collectives(
        self, shapes: Shapes, world_size: int, *, plan: Sequence[int] | None = None
    ) -> Sequence[Collective]:
        from shardscope.analytic.communication.compressed import share_size

        num_elements = sum(prod(shape) for shape in shapes)
        if self.summed_width is not None:
            count = self.packet_bytes(num_elements) // self.summed_width
            return [Collective("sum", count, self.summed_width)]
        if self.meets == "gather":
            return [Collective("all_gather", self.packet_bytes(num_elements))]
        packet = self.packet_bytes(share_size(num_elements, world_size, self.align))
        return [Collective("all_to_all", packet), Collective("all_gather", packet)]

    @property
    def memories(self) -> int:
        """Number of float32 values stored for each packed element, if the method keeps a residual."""
        return 1

    def kept_bytes(self, shapes: Shapes, world_size: int, *, scatters: bool = False) -> int | None:
        """Return the bytes of a bucket's residual, plus those of the share's residual if the mean is repacked."""
        from shardscope.analytic.communication.compressed import FLOAT_BYTES, share_size

        if not self.remembers:
            return 0
        num_elements = sum(prod(shape) for shape in shapes)
        packs_again = self.meets == "two-phase" and not scatters
        share = share_size(num_elements, world_size, self.align) if packs_again else 0
        return FLOAT_BYTES * (self.memories * num_elements + share)

    def share_collective(self, share: int, world_size: int) -> Collective:
        """Return the collective that gives each rank its share of a bucket's mean; ``sum`` means a reduce-scatter.

        Args:
            share: Number of elements in the share.
            world_size: Number of ranks.
        """
        packet = self.packet_bytes(share)
        if self.summed_width is None:
            return Collective("all_to_all", packet)
        return Collective("sum", world_size * packet // self.summed_width, self.summed_width)

    def build(self, job: Job) -> Any:
        from shardscope.training.compression.packed import Packed

        exchange = "gather" if self.meets == "gather" else "two-phase"
        return Packed.of(self.name, self.codec(), feedback=self.remembers, exchange=exchange)


class BlockCompression(PackedCompression):
    """Base class of methods that send `width` bits per element and one float32 scale per block."""

    block: int = Field(default=256, ge=8, le=65536)
    """Number of elements that share one scale: a multiple of 8, from 8 to 65536."""

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        check_block(self.block)
        return self

    @property
    @required
    def width(self) -> int:
        """Bits per element."""
        raise NotImplementedError

    @property
    def align(self) -> int:
        return self.block

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import blocks_bytes

        return blocks_bytes(num_elements, self.block, self.width)


class BlockIntegers(BlockCompression):
    """Base class of methods that round to integers or floats of a few bits, with one scale per block."""

    family = "Block quantization"
    codec_passes = 2.0  # one to find the scales, one to convert

    feedback: bool = False
    """Error feedback: add the compression error of a step to the next step's gradient."""
    exchange: Exchange = "two-phase"
    """How packets are exchanged: each rank unpacks, averages and repacks its share of the elements (``two-phase``), or
    every rank receives all packets (``gather``, for which traffic per rank grows with the number of ranks)."""


def check_block(block: int) -> None:
    """Reject block sizes that are not a multiple of 8 elements, since each block must end on a byte boundary.

    Raises:
        SpecError: The size is not a multiple of 8; the message names the next larger multiple.
    """
    if block % 8:
        raise SpecError(
            f"compression.block={block} is not a multiple of 8; use, for example, {-(-block // 8) * 8}"
        )
