"""Majority vote on signs, without magnitudes (Bernstein et al. 2018, arXiv:1810.05291)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.look import MethodStyle

if TYPE_CHECKING:
    from shardscope.spec.job import Job


class SignVote(PackedCompression):
    """For each element, ranks vote with the sign of their gradient, and the majority's sign is used."""

    name = "sign-vote"
    family = "Signs"
    look = MethodStyle("#b866a6", "dot", "triangle-up-open")
    codec_passes = 1.0  # each element separately
    is_a_vote = True

    def packet_bytes(self, num_elements: int) -> int:
        from shardscope.analytic.communication.compressed import bits_bytes

        return bits_bytes(num_elements, 1)

    @property
    def diverges_because(self) -> str:
        return self.is_too_coarse()

    def codec(self) -> Any:
        from shardscope.methods.compressors.sign._torch import Vote

        return Vote()

    def build(self, job: Job) -> Any:
        from shardscope.methods.compressors.sign._torch import MajorityVote

        return MajorityVote(self.name)
