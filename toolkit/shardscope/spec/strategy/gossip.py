"""Decentralised averaging with ring neighbours."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shardscope.spec.strategy.base import StrategySpec


class Gossip(StrategySpec):
    """Each rank takes its own step, then averages its parameters with those of its two ring neighbours only.

    A rank weighs itself and each neighbour by 1/3 (two ranks: 1/2 each). These weights are doubly stochastic, so the
    mean over all ranks is left as it is while the ranks approach it. The model that is evaluated is the mean.

    Lian et al., Can decentralized algorithms outperform centralized algorithms? (NIPS 2017, arXiv 1705.09056), in the
    order that mixes after the update. LAMB, LARS and the clip see the rank's own gradient and weights.
    """

    kind: Literal["gossip"] = "gossip"
    mix_every: int = Field(default=1, ge=1)
    """Steps between two averagings. At least 1."""
    measure_every: int = Field(default=10, ge=1)
    """Steps between two measurements of how far the ranks are apart; each costs an all-reduce of the parameters."""
    slice_mb: float = Field(default=4.0, gt=0, le=1024)
    """Longest message in MiB: larger parameters travel in slices, so that averaging overlaps receiving."""
    _variant: ClassVar[str | None] = "mix_every"

    @property
    def label(self) -> str:
        """``gossip``, or ``gossip:4`` where ranks average at every fourth step only."""
        return "gossip" if self.mix_every == 1 else f"gossip:{self.mix_every}"

    @property
    def differs_because(self) -> str:
        """No gradient is ever averaged over all ranks."""
        return "each rank updates parameters of its own and averages them with its neighbours' only"

    def drift(self, world_size: int) -> int:
        """A neighbour can be `mix_every` steps ahead, its neighbour as many more."""
        return self.mix_every * (world_size // 2)
