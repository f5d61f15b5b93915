"""Search space of the planner: the values to try on each axis of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.compression import AnyLayoutCompression, Compression
from shardscope.spec.layout import LayoutSchedule, Offload, Recompute, searched_schedules
from shardscope.spec.numbers import Count, CountOrZero
from shardscope.spec.pipeline_schedule import PipelineSchedule

LARGEST_MICRO_BATCH = 16


class SearchAxes(Spec):
    """Values that a search tries on each axis; None for a degree of parallelism means all valid divisors.

    Lossy gradient compression is left out by default, because it changes the result of training.

    Example:
        >>> SearchAxes(pipeline=(1, 2, 4), offload=("none",)).schedule_options[:3]
        (('gpipe', 1), ('1f1b', 1), ('interleaved', 2))
    """

    data: tuple[Count, ...] | None = None
    """Data-parallel degrees to accept; None accepts all. The degree follows from the device count and other degrees."""
    tensor: tuple[Count, ...] | None = None
    pipeline: tuple[Count, ...] | None = None
    context: tuple[Count, ...] | None = None
    expert: tuple[Count, ...] | None = None
    micro_batch: tuple[Count, ...] | None = None
    """Micro-batch sizes; None for the divisors of the global batch up to 16."""
    schedule: tuple[LayoutSchedule, ...] = Field(default_factory=searched_schedules, min_length=1)
    virtual_stages: tuple[Count, ...] = Field(default=(2, 3, 4, 6, 8), min_length=1)
    """Stages per rank for interleaved schedules; V-shaped schedules always have two, and all other schedules one."""
    zero: tuple[Literal[0, 1, 2, 3], ...] = Field(default=(0, 1, 2, 3), min_length=1)
    zero_in_pipelines: tuple[Literal[0, 1, 2, 3], ...] = Field(default=(0, 1, 2, 3), min_length=1)
    """ZeRO stages that are tried with several pipeline stages; several frameworks do not support all of them."""
    zero_for_offload: tuple[tuple[Offload, Literal[0, 1, 2, 3]], ...] = ()
    """Pairs of an offload setting and the lowest ZeRO stage with which it is tried, such as ``("states", 3)``."""
    full_for_offload: tuple[Offload, ...] = ()
    """Offload settings that are tried only if all layers are recomputed, because they move only the inputs of
    layers."""
    shard: tuple[Literal["all", "node"], ...] = Field(default=("all", "node"), min_length=1)
    """Shard model states over all replicas, or over the replicas on one node (HSDP)."""
    recompute: tuple[Recompute, ...] = Field(default=("none", "selective", "full"), min_length=1)
    recompute_layers: tuple[CountOrZero, ...] | None = None
    """Numbers of layers per stage to recompute with full recomputation, 0 for all. None tries all layers and, if a
    layout does not fit without recomputation, also the fewest layers with which it fits; if `recompute` is restricted
    to "full", only all layers. Numbers do not exclude layouts without full recomputation; for that, write
    fix={"recompute": "full", "recompute_layers": 4}. With offloaded activations, recomputing more layers than the
    fewest can be faster."""
    offload: tuple[Offload, ...] = Field(
        default=("none", "optimizer", "states", "activations", "all"), min_length=1
    )
    compression: tuple[AnyLayoutCompression, ...] = Field(
        default_factory=lambda: (Compression("none"),), min_length=1
    )
    sequence_parallel: tuple[bool, ...] = Field(default=(False, True), min_length=1)

    @property
    def schedule_options(self) -> tuple[tuple[str, int], ...]:
        """All pairs (schedule, virtual stages) to try."""
        found = [(name, PipelineSchedule(name)) for name in self.schedule]
        return tuple(
            (name, virtual)
            for name, schedule in found
            for virtual in (
                self.virtual_stages if schedule.most_stages is None else (schedule.default_stages,)
            )
        )

    def fixed(self, values: Mapping[str, Any]) -> SearchAxes:
        """Return this space with some axes restricted to one or more values.

        Args:
            values: The value or values to try, by name of the axis.

        Raises:
            SpecError: The axis does not exist, or a value is invalid for it.

        Example:
            >>> SearchAxes().fixed({"tensor": 8, "zero": [1, 2]}).tensor
            (8,)
        """
        axes = type(self).model_fields
        for name in values:
            if name not in axes:
                raise unknown_name("fix", name, axes)
        return self.replace(**{name: _several(name, value) for name, value in values.items()})


def _several(name: str, value: Any) -> tuple[Any, ...]:
    many = isinstance(value, Sequence) and not isinstance(value, str)
    values = tuple(each for at, each in enumerate(value) if each not in value[:at]) if many else (value,)
    if not values:
        raise SpecError(f"fix={{{name!r}: []}} leaves nothing to try; give at least one value of {name}")
    return values
