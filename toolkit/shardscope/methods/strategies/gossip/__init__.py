"""Gossip: decentralised averaging of parameters with ring neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from shardscope.errors import SpecError
from shardscope.methods.compressors.packed import PackedCompression
from shardscope.spec.compression import Compression
from shardscope.spec.look import MethodStyle
from shardscope.spec.numbers import Count, MessageMiB
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.analytic.communication import Traffic
    from shardscope.analytic.communication.plan import StepPlan
    from shardscope.analytic.job_step import JobStep
    from shardscope.analytic.memory import RankStates
    from shardscope.spec.job import Job


class Gossip(Strategy):
    """Each rank takes its own step, then averages its parameters with those of its two ring neighbours only.

    The average weights the rank itself and each neighbour by 1/3 (by 1/2 with two ranks). These weights are doubly
    stochastic, so mixing moves the ranks towards their mean without changing it. The mean is the model that is
    evaluated.

    Lian et al., Can decentralized algorithms outperform centralized algorithms? (NIPS 2017, arXiv 1705.09056), in the
    variant that mixes after the update. LAMB, LARS and clipping use each rank's own gradient and weights.

    With compression, this is CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019, arXiv 1902.00340). Each rank keeps public
    copies of its own and its neighbours' parameters in float32 (three copies in total, or two with two ranks). It sends
    the packed difference between its parameters and their public copy, and then moves its parameters by a step of size
    `gamma` towards the mean of all copies.
    """

    name = "gossip"
    variant = "mix_every"
    family = "Without a centre"
    look = MethodStyle("#c49a0c", "dot", "pentagon")
    carries = frozenset({"sums", "packets"})
    zero_stage = 0

    mix_every: Count = 1
    """Number of steps between averagings with the neighbours, at least 1."""
    measure_every: Count = 10
    """Number of steps between measurements of the distance between ranks; each measurement all-reduces the
    parameters."""
    slice_mb: MessageMiB = 4.0
    """Maximum message size in MiB: parameters are sent in slices of this size, so that averaging overlaps receiving."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """With compression: size of the step towards the mean of the public copies, 0 < value <= 1; None means a default
    that depends on the method. This default is 1 for methods that transmit most of a difference, 0.5 for signs, and
    less for sparse methods, in proportion to their ratio."""

    @property
    def label(self) -> str:
        """Short name in tables and plots: ``gossip``, or ``gossip:4`` if ranks average only every fourth step."""
        return self.name if self.mix_every == 1 else f"{self.name}:{self.mix_every}"

    def step_size(self, compression: Compression) -> float:
        """Return `gamma`, or the default for this compression if `gamma` is None."""
        return compression.consensus_step if self.gamma is None else self.gamma

    @property
    def hides_noise_because(self) -> str:
        """Why the gradient noise scale cannot be measured under this strategy."""
        return "no gradient is ever averaged over all ranks, and each rank has its own parameters"

    @property
    def needs_even_because(self) -> str:
        """Why all ranks need equal shares of the batch."""
        return "ranks average parameters, not gradients"

    def check(self, job: Job) -> None:
        """Reject settings without effect, and compression whose noise exceeds the differences between ranks."""
        compression = job.compression
        if self.gamma is not None and not compression.is_on:
            raise SpecError(
                f"strategy.gamma={self.gamma:g} has no effect without compression; leave it out, or set compression"
            )
        if "feedback" in compression.changed:
            raise SpecError(
                f"compression.feedback={compression.settings['feedback']} has no effect with strategy='gossip', whose "
                "public copies already compensate for compression errors; leave it out"
            )
        if compression.diverges_because is not None:
            raise SpecError(compression.diverges_because)

    @property
    def differs_because(self) -> str:
        """Why results differ from training in one process: no gradient is averaged over all ranks."""
        return "each rank updates its own parameters and averages them only with its neighbours'"

    def drift(self, world_size: int) -> int:
        """Return the number of steps that a rank can be ahead of rank 0: `mix_every` per hop on the ring."""
        return self.mix_every * (world_size // 2)

    def exchanged_bytes(self, gradient_bytes: int, world_size: int, *, micro_batches: int = 1) -> float:
        """Return the mean bytes per step: every `mix_every` steps, each rank sends all parameters to each neighbour."""
        from shardscope.analytic.communication import gossip_mix_bytes

        return world_size * gossip_mix_bytes(gradient_bytes, world_size) / self.mix_every

    def traffic(self, step: JobStep) -> Traffic:
        """Return the traffic of parameters or packets to neighbours, and of measurements of the distance."""
        from shardscope.analytic.communication.traffic import together

        return together([self._mixing(step), self._measuring(step)])

    def _mixing(self, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.gossip import mix_traffic

        if step.number % self.mix_every:
            return {}
        now = step.compression
        packet = now.packet_bytes(step.num_elements) if isinstance(now, PackedCompression) else None
        return mix_traffic(
            step.num_elements, step.element_bytes, step.world_size, packet_bytes=packet, slice_mb=self.slice_mb
        )  # fmt: skip

    def _measuring(self, step: JobStep) -> Traffic:
        from shardscope.analytic.communication.gossip import consensus_traffic

        if step.number > 1 and step.number % self.measure_every:
            return {}
        return consensus_traffic(step.num_elements * step.element_bytes, step.world_size)

    def plan(self, step: JobStep) -> StepPlan:
        """Return the messages between neighbours after the update, and the measurements of the distance."""
        from shardscope.analytic.communication.plan import Exchange, StepPlan, When, neighbour_rounds, whole

        after = When("optimizer")
        mixing = [
            Exchange(name, after, neighbour_rounds(int(sent.bytes[0]), step.world_size))
            for name, sent in self._mixing(step).items()
        ]
        return StepPlan((*mixing, *whole(self._measuring(step), after)))

    def cargo(self, collective: str) -> str:
        """Return ``parameters``: no gradient is ever sent."""
        return "parameters"

    def states(self, step: JobStep) -> RankStates:
        """Return the bytes on each rank: a whole replica, with its own gradients and optimizer state."""
        from shardscope.analytic.memory import spread_states
        from shardscope.analytic.memory.work_space import gossip_buffer_bytes, updates_of

        def buffer_bytes() -> int:
            has_mixed = step.number >= self.mix_every
            return updates_of(step.rows, step) + gossip_buffer_bytes(
                step, slice_mb=self.slice_mb, has_mixed=has_mixed
            )

        return spread_states(step).with_work_buffers(step, buffer_bytes)

    def build(self, job: Job, context: Any) -> Any:
        from shardscope.methods.strategies.gossip._torch import GossipRank

        return GossipRank(job, context)
