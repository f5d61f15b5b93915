"""Strategies: how the ranks share the work. One class each, told apart by `kind`.

Wherever a strategy is asked for, its short string does as well: ``"ring"`` is ``Ring()``, and what follows a colon
sets the field that the class names in `_variant`: ``"ring:2"`` is ``Ring(directions=2)``. To add a strategy, write its
class here, add it to `Strategy`, and implement it in one file of `shardscope.training.strategies`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec


class _Strategy(Spec):
    kind: str
    _variant: ClassVar[str | None] = None
    min_ranks: ClassVar[int] = 2
    max_ranks: ClassVar[int | None] = None

    @property
    def label(self) -> str:
        """The short string that stands for this strategy in tables, plots and run names."""
        return self.kind


class Single(_Strategy):
    """One process and no communication: the oracle that every other strategy is held against."""

    kind: Literal["single"] = "single"
    min_ranks: ClassVar[int] = 1
    max_ranks: ClassVar[int | None] = 1


class AllReduce(_Strategy):
    """DistributedDataParallel with the backend's own all-reduce, buckets overlapped with the backward pass."""

    kind: Literal["all-reduce"] = "all-reduce"
    bucket_mb: float = Field(default=25.0, gt=0, le=1024)
    """Size of a gradient bucket in MiB; a bucket is sent as soon as all its gradients are there. 0 < value <= 1024."""


class Ring(_Strategy):
    """Our own ring: scatter-reduce, then all-gather, each rank talking to its two neighbours only.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009).
    """

    kind: Literal["ring"] = "ring"
    directions: Literal[1, 2] = 1
    """1: every chunk travels clockwise. 2: half of each bucket travels each way, so both lanes of a link are used."""
    slice_mb: float = Field(default=4.0, gt=0, le=1024)
    """Longest message in MiB: a longer chunk is cut into slices, so that adding one overlaps receiving the next."""
    bucket_mb: float = Field(default=25.0, gt=0, le=1024)
    """Size of a gradient bucket in MiB. 0 < value <= 1024."""
    trace_chunks: bool = False
    """Write one event for every chunk sent, so that the ring can be watched hop by hop. Slows small steps."""
    _variant: ClassVar[str | None] = "directions"

    @property
    def label(self) -> str:
        """``ring``, or ``ring:2`` for both directions."""
        return "ring" if self.directions == 1 else "ring:2"


AnyStrategy = Single | AllReduce | Ring
STRATEGIES: dict[str, type[_Strategy]] = {
    cls.model_fields["kind"].default: cls for cls in get_args(AnyStrategy)
}
"""Every strategy there is, by its short name, in the order in which training systems evolved."""


def parse_strategy(value: Any) -> Any:
    """``"ring:2"`` as ``Ring(directions=2)``; a strategy or a mapping with `kind` is passed through, checked.

    Raises:
        SpecError: Unknown name, or a variant where there is none.
    """
    if isinstance(value, dict):
        kind = value.get("kind")
        if kind not in STRATEGIES:
            raise unknown_name("strategy", kind, STRATEGIES)
        return STRATEGIES[kind](**value)
    if not isinstance(value, str):
        return value
    kind, _, variant = value.partition(":")
    if kind not in STRATEGIES:
        raise unknown_name("strategy", value, STRATEGIES)
    cls = STRATEGIES[kind]
    if not variant:
        return cls()  # type: ignore[call-arg]  # each has a default kind
    if cls._variant is None:
        raise SpecError(f"strategy={value!r}: {kind!r} has no variants; use {kind!r}")
    return cls(**{cls._variant: int(variant) if variant.isdigit() else variant})


Strategy = Annotated[AnyStrategy, BeforeValidator(parse_strategy)]
