"""Gossip: decentralised averaging with ring neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.compression import Compression
from shardscope.spec.look import Look
from shardscope.spec.numbers import Count, MessageMiB
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job


class Gossip(Strategy):
    """Each rank takes its own step, then averages its parameters with those of its two ring neighbours only.

    A rank weighs itself and each neighbour by 1/3 (two ranks: 1/2 each). These weights are doubly stochastic, so mixing
    does not change the mean over all ranks while the ranks approach it. The model that is evaluated is the mean.

    Lian et al., Can decentralized algorithms outperform centralized algorithms? (NIPS 2017, arXiv 1705.09056), in the
    variant that mixes after the update. LAMB, LARS and clipping use the rank's own gradient and weights.

    With compression it is CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019, arXiv 1902.00340): ranks send packed
    differences from public copies of themselves, keep the neighbours' copies too (three times the parameters in
    float32, twice on two ranks), and move towards the mean of the copies by a step gamma.
    """

    name = "gossip"
    variant = "mix_every"
    family = "Without a centre"
    look = Look("#c49a0c", "dot", "pentagon")
    carries = frozenset({"sums", "packets"})
    zero_stage = 0

    mix_every: Count = 1
    """Steps between two averagings. At least 1."""
    measure_every: Count = 10
    """Steps between two measurements of the distance between ranks; each costs an all-reduce of the parameters."""
    slice_mb: MessageMiB = 4.0
    """Longest message in MiB: larger parameters are sent in slices, so that averaging overlaps receiving."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """With compression: the step towards the mean of the public copies, 0 < value <= 1. None means 1 for methods that
    keep most of a difference, 0.5 for signs, and less for sparse methods, in proportion to their ratio."""

    @property
    def label(self) -> str:
        """``gossip``, or ``gossip:4`` if ranks average only at every fourth step."""
        return self.name if self.mix_every == 1 else f"{self.name}:{self.mix_every}"

    def step_size(self, compression: Compression) -> float:
        """Return gamma for this compression, with the default filled in."""
        return compression.consensus_step if self.gamma is None else self.gamma

    @property
    def hides_noise_because(self) -> str:
        """Why the gradient noise scale cannot be measured."""
        return "no gradient is ever averaged over all ranks, each of which has parameters of its own"

    def check(self, job: Job) -> None:
        """Refuse settings without an effect, and methods whose noise exceeds the differences between ranks."""
        compression = job.compression
        if self.gamma is not None and not compression.is_on:
            raise SpecError(
                f"strategy.gamma={self.gamma:g} has no effect without compression; leave it out, or set compression"
            )
        if "feedback" in compression.changed:
            raise SpecError(
                f"compression.feedback={compression.settings['feedback']} has no effect with gossip, whose public "
                "copies keep what packets leave out; leave it out"
            )
        if compression.diverges_because is not None:
            raise SpecError(compression.diverges_because)

    @property
    def differs_because(self) -> str:
        """Why results differ from one process: no gradient is averaged over all ranks."""
        return "each rank updates parameters of its own and averages them with its neighbours' only"

    def drift(self, world_size: int) -> int:
        """Steps that a rank can be ahead of rank 0: `mix_every` for each hop on the ring."""
        return self.mix_every * (world_size // 2)

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Mean bytes per step: S from each rank to each of its neighbours at every `mix_every`-th step."""
        from shardscope.analytic.communication import gossip_mix_bytes

        return world_size * gossip_mix_bytes(gradient_bytes, world_size) / self.mix_every

    def traffic(self, step: JobStep) -> Traffic:
        """Traffic of parameters, or packets, to each neighbour, and of the periodic distance measurement."""
        from shardscope.analytic.communication.gossip import consensus_traffic, mix_traffic
        from shardscope.analytic.communication.traffic import together

        now, parts = step.compression, []
        if step.number % self.mix_every == 0:
            packet = now.packet_bytes(step.num_elements) if isinstance(now, PackedCompression) else None
            parts.append(
                mix_traffic(
                    step.num_elements,
                    step.element_bytes,
                    step.world_size,
                    packet_bytes=packet,
                    slice_mb=self.slice_mb,
                )
            )
        if step.number == 1 or step.number % self.measure_every == 0:
            parts.append(consensus_traffic(step.num_elements * step.element_bytes, step.world_size))
        return together(parts)

    def states(self, step: JobStep) -> RankStates:
        """States of whole replicas, each with its own gradients and moments."""
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import gossip_room, updates_of

        def room() -> int:
            has_mixed = step.number >= self.mix_every
            return updates_of(step.rows, step) + gossip_room(
                step, slice_mb=self.slice_mb, has_mixed=has_mixed
            )

        return spread_states(step).working_in(step, room)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.gossip._torch import GossipRank

        return GossipRank(job, context)
