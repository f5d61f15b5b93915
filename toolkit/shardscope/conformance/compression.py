"""What a method of compression must satisfy."""

from __future__ import annotations

from typing import ClassVar

import torch

from shardscope.conformance.method import MethodConformance
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.runtime import Run
from shardscope.spec.compression import Compression

_SIZES = (0, 1, 7, 8, 9, 255, 256, 257, 1031, 4099)


class CompressionConformance(MethodConformance):
    """Ranks train with it, and send as many bytes as it says. Of a codec: packets are as long as it says, and zeros
    stay zeros.
    """

    kind = Compression
    strategies: ClassVar[tuple[str, ...]] = ("ring",)

    def test_packets_are_as_long_as_it_says(self) -> None:
        """However many values are packed."""
        method = self.method()
        if not isinstance(method, PackedCompression):
            return
        codec = method.codec()
        for count in _SIZES:
            told, packed = method.packet_bytes(count), codec.num_bytes(count)
            assert told == packed, f"packet_bytes({count}) is {told}, and its codec makes {packed} bytes"

    def test_packing_repeats_itself_and_leaves_zeros_alone(self) -> None:
        """The same values and seed make the same packet; nothing comes out of nothing."""
        method = self.method()
        if not isinstance(method, PackedCompression):
            return
        codec = method.codec()
        values = torch.randn(1031, generator=torch.Generator().manual_seed(3))
        packets = [torch.zeros(codec.num_bytes(values.numel()), dtype=torch.uint8) for _ in range(2)]
        for packet in packets:
            codec.encode(values.clone(), packet, 5)
        assert torch.equal(*packets), "the same values and seed make different packets"
        if method.is_a_vote:
            return
        codec.encode(torch.zeros_like(values), packets[0], 5)
        back = torch.empty_like(values)
        codec.decode(packets[0], back, 5)
        assert not back.any(), "zeros come back as something else"

    def _look_at(self, run: Run) -> None:
        """The bytes of the last step, on each rank, against `bucket_bytes` of the job's one bucket."""
        if not isinstance(run.job.compression, PackedCompression) or run.job.world_size == 1:
            return
        shapes = [(run.events("start", rank=0)[0]["num_params"],)]
        expected = run.job.compression.bucket_bytes(shapes, run.job.world_size)
        last = [event for event in run.events("step") if event["step"] == run.job.steps]
        for event in last:
            sent = sum(row["sent_bytes"] for row in event["traffic"].values())
            told = int(expected[event["rank"]])
            assert sent == told, (
                f"rank {event['rank']} sent {sent} bytes in a step, and bucket_bytes says {told}"
            )
