"""A table of layouts as arrays, so that one call handles one layout or a million."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardscope.spec.compression import Compression
from shardscope.spec.layout import OFFLOAD_NAMES, RECOMPUTE_NAMES, Layout, schedule_names
from shardscope.spec.layout_optimizer import LayoutOptimizer

Ints = npt.NDArray[np.int64]


class _Columns(NamedTuple):
    """The columns of `Layouts`, as a named tuple. Its `len` counts columns; the `len` of a `Layouts` counts rows."""

    data: Ints
    tensor: Ints
    pipeline: Ints
    context: Ints
    expert: Ints
    zero: Ints
    shard: Ints
    """Number of ranks over which ZeRO shards; the default of a layout, 0, is replaced by the actual number."""
    micro_batch: Ints
    num_micro_batches: Ints
    virtual_stages: Ints
    schedule: Ints
    recompute: Ints
    recompute_layers: Ints
    offload: Ints
    compression: Ints
    sequence_parallel: Ints
    compressions: tuple[Compression, ...]
    """Compression methods; the column `compression` holds indices into this tuple, whose first entry is ``none``."""
    precision: str
    optimizer: LayoutOptimizer
    flash_attention: bool


def distinct(methods: Iterable[Compression]) -> tuple[Compression, ...]:
    """Return the distinct compression methods, with ``none`` first."""
    return tuple(dict.fromkeys([Compression(name="none"), *methods]))


class Layouts(_Columns):
    """A table of layouts: one array for each field of `spec.Layout`, with one element per layout.

    Schedules, recomputation and offloading are stored as indices into the tuples of names in `spec.layout`, compression
    methods as indices into `compressions`. All layouts of a table share precision, optimizer and flash attention,
    because these select the formulas; a search evaluates one table for each combination of them.
    """

    __slots__ = ()

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> Layouts:
        """Build a table of layouts, which must share precision, optimizer and flash attention."""
        rows = list(layouts)
        first = rows[0]
        alike = {(row.precision, row.optimizer, row.flash_attention) for row in rows}
        assert len(alike) == 1, "layouts of one table must share precision, optimizer and flash_attention"

        def column(name: str) -> Ints:
            return np.array([getattr(row, name) for row in rows], dtype=np.int64)

        def index(name: str, values: tuple[Hashable, ...]) -> Ints:
            places = {value: place for place, value in enumerate(values)}
            return np.array([places[getattr(row, name)] for row in rows], dtype=np.int64)

        methods = distinct(row.compression for row in rows)

        data, context, shard = column("data"), column("context"), column("shard")
        return cls(
            data=data,
            tensor=column("tensor"),
            pipeline=column("pipeline"),
            context=context,
            expert=column("expert"),
            zero=column("zero"),
            shard=np.where(shard > 0, shard, data * context),
            micro_batch=column("micro_batch"),
            num_micro_batches=column("num_micro_batches"),
            virtual_stages=column("virtual_stages"),
            schedule=index("schedule", schedule_names()),
            recompute=index("recompute", RECOMPUTE_NAMES),
            recompute_layers=column("recompute_layers"),
            offload=index("offload", OFFLOAD_NAMES),
            compression=index("compression", methods),
            sequence_parallel=column("sequence_parallel"),
            compressions=methods,
            precision=first.precision,
            optimizer=first.optimizer,
            flash_attention=first.flash_attention,
        )

    def __len__(self) -> int:
        """Number of layouts in the table."""
        return self.data.size

    @property
    def most_recomputed(self) -> Ints:
        """Largest number of layers that a device recomputes; 0 for all. See `analytic.recomputation`."""
        return self.recompute_layers * self.virtual_stages

    def _replace(self, **columns: Any) -> Self:
        """Return a table with some columns changed (the inherited method requires that `len` counts columns)."""
        return type(self)(**{**self._asdict(), **columns})
