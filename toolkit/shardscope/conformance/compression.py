"""Conformance tests for compression methods."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from shardscope.conformance.method import MethodConformance
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.runtime import Run
from shardscope.spec.compression import Compression

_SIZES = (0, 1, 7, 8, 9, 255, 256, 257, 1031, 4099)
_SEED = 5


def _packed(codec: Any, values: torch.Tensor) -> torch.Tensor:
    packet = torch.zeros(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, packet, _SEED)
    return packet


def _back(codec: Any, values: torch.Tensor) -> torch.Tensor:
    back = torch.full_like(values, torch.nan)  # makes unwritten elements visible
    codec.decode(_packed(codec, values), back, _SEED)
    return back


class CompressionConformance(MethodConformance):
    """Test that a method trains with its defaults, sends the number of bytes it declares, and has a valid `Codec`."""

    kind = Compression
    strategies: ClassVar[tuple[str, ...]] = ("ring",)

    def test_packets_are_as_long_as_it_says(self) -> None:
        """Packets have the length given by `packet_bytes` for any number of values."""
        method = self.method()
        if not isinstance(method, PackedCompression):
            return
        codec = method.codec()
        for count in _SIZES:
            told, packed = method.packet_bytes(count), codec.num_bytes(count)
            assert told == packed, (
                f"packet_bytes({count}) returns {told}, but num_bytes of its codec returns {packed}"
            )

    def test_a_codec_does_what_its_docstrings_say(self) -> None:
        """For many sizes, including 0, encoding is deterministic and leaves its input unchanged.

        Zeros are decoded as zeros, and the codec can also add decoded values to a tensor or subtract them.
        """
        method = self.method()
        if not isinstance(method, PackedCompression):
            return
        codec = method.codec()
        for count in _SIZES:
            self._check_codec(codec, torch.randn(count, generator=torch.Generator().manual_seed(count)))
        if not method.is_a_vote:
            assert not _back(codec, torch.zeros(_SIZES[-1])).any(), "zeros are decoded as nonzero values"
        assert _back(codec, torch.ones(_SIZES[-1])).any(), "ones are decoded as zeros only"

    @staticmethod
    def _check_codec(codec: Any, values: torch.Tensor) -> None:
        size, given = values.numel(), values.clone()
        packet = _packed(codec, values)
        assert torch.equal(values, given), f"encode changes its input of {size} values"
        assert torch.equal(packet, _packed(codec, values)), (
            "encoding twice with the same seed gives different packets"
        )
        back, there = _back(codec, values), torch.ones(size)
        codec.decode(packet, there, _SEED, add=True)
        assert torch.allclose(there, 1 + back), "decode(..., add=True) does not add to the existing values"
        left = values.clone()
        codec.subtract(packet, left, _SEED)
        assert torch.allclose(left, values - back, atol=1e-6), (
            "subtract does not subtract the decoded values from the input"
        )

    def _check_records(self, run: Run) -> None:
        """Compare the bytes that each rank sent in the last step with `bucket_bytes` of the job's single bucket."""
        if not isinstance(run.job.compression, PackedCompression) or run.job.world_size == 1:
            return
        shapes = [(run.events("start", rank=0)[0]["num_params"],)]
        expected = run.job.compression.bucket_bytes(shapes, run.job.world_size)
        last = [event for event in run.events("step") if event["step"] == run.job.steps]
        for event in last:
            sent = sum(row["sent_bytes"] for row in event["traffic"].values())
            told = int(expected[event["rank"]])
            assert sent == told, (
                f"rank {event['rank']} sent {sent} bytes in the last step, but bucket_bytes returns {told}"
            )
