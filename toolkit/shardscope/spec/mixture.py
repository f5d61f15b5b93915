"""Mixtures of experts: their sizes, and how a model that is trained routes tokens to them."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Self

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.numbers import Count, CountOrZero


class Mixture(Spec):
    """A mixture of experts in place of the feed-forward layer."""

    experts: Count
    """Number of routed experts in a layer."""
    active: Count
    """Number of routed experts that process each token (top-k)."""
    ffn: Count
    """Inner width of one routed expert."""
    shared_ffn: CountOrZero = 0
    """Total inner width of the shared experts, which process every token; 0 for none."""
    dense_layers: CountOrZero = 0
    """Number of layers at the start of the model with a dense feed-forward layer instead of experts."""
    router_bias: bool = False
    """Whether a bias per expert is added to its score (DeepSeek-V3, gpt-oss). DeepSeek's is not trained by gradients,
    but published parameter counts include it."""
    shared_gate: bool = False
    """Whether there is a gate in front of the shared experts (Qwen2-MoE)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.active > self.experts:
            raise SpecError(
                f"mixture.active={self.active} is more than mixture.experts={self.experts}; "
                f"use 1 to {self.experts}"
            )
        return self


class RoutedMixture(Mixture):
    """A mixture of experts with the settings of its router, for models that jobs train.

    A sequence is a group of tokens in the sense of GShard (Lepikhin et al., arXiv 2006.16668, section 2.2): capacity
    and balance loss are those of each sequence, so neither depends on how a batch is split into micro-batches or over
    ranks.
    """

    capacity_factor: Annotated[float, Field(gt=0, le=1024)] | None = None
    """Largest number of tokens that an expert accepts from a sequence, relative to an even load; None drops no token.
    Tokens' first choices are placed before their second ones, and so on; those that do not fit are dropped."""
    balance: Annotated[float, Field(ge=0, le=1024)] = 0.01
    """Weight of the balance loss in the loss of training; 0 for none. How soon it evens out the loads also depends on
    the learning rate. With Adam's first steps, which are equally long for all weights, routers can run away from an
    even load faster than a small weight brings them back: with 0.01, the small models of the catalogue take about 60
    steps at ``lr=3e-4``, and many more at ``3e-3``."""

    @model_validator(mode="after")
    def _check_trainable(self) -> Self:
        if self.shared_gate:
            raise SpecError(
                "mixture.shared_gate=True is not available in models that jobs train; leave it out"
            )
        return self

    def capacity(self, seq: int) -> int | None:
        """Return the most tokens of a sequence of `seq` tokens that an expert takes; None if there is no limit.

        This is the capacity of Switch Transformers (Fedus et al., arXiv 2101.03961, equation 3), with k choices for
        each token: ``ceil(capacity_factor * k * seq / experts)``.

        Example:
            >>> RoutedMixture(experts=8, active=1, ffn=64, capacity_factor=1.25).capacity(64)
            10
        """
        if self.capacity_factor is None:
            return None
        return ceil(self.capacity_factor * self.active * seq / self.experts)

    @property
    def sizes(self) -> Mixture:
        """The same mixture without the settings of the router."""
        return Mixture(**{name: getattr(self, name) for name in Mixture.model_fields})
