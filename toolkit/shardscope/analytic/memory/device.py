"""Memory per device in bytes, for one layout or for a million layouts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.moments import Peak, gradients_of, peak_of
from shardscope.analytic.memory.offload import (
    OFFLOADS_ACTIVATIONS,
    OFFLOADS_OPTIMIZER,
    OFFLOADS_STATES,
    tiers,
)
from shardscope.analytic.memory.rows import (
    NONE,
    Floats,
    LayoutRows,
    first_with_gradients,
    rows_of,
    splits_backward,
)
from shardscope.analytic.memory.stage import Blocks, blocks_of
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

ROWS_AT_ONCE = 16384
"""Number of layouts whose arrays together fit in a core's cache."""


HERE = np.ones(1, bool)


class MemoryParts(NamedTuple):
    """Bytes on a device, by type of memory, and the bytes offloaded to host memory (`host`) and to drives (`nvme`)."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    buffers: Floats
    host: Floats
    nvme: Floats

    @property
    def total(self) -> Floats:
        """Total bytes on the device, without offloaded bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def drive_share(self) -> Floats:
        """Fraction of the offloaded bytes that are on drives instead of in host memory; 0 if nothing is offloaded."""
        return np.asarray(self.nvme / np.maximum(self.host + self.nvme, 1.0))


def device_memory(
    model: Transformer,
    layouts: Layouts,
    *,
    framework: str | Framework = "megatron-core",
    device: Device | None = None,
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Return the memory of the device with the highest peak, for each layout.

    Args:
        model: The model.
        layouts: Table of layouts.
        framework: A key of `FRAMEWORKS`, or your own `Framework`.
        device: Device that the layouts run on; None for a GPU of unknown architecture, which counts as a Hopper GPU.
        host_capacity: Bytes of host memory per device; offloaded bytes that exceed it count as `nvme`.

    Returns:
        Bytes by type of memory, as arrays with one element per layout.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=2, hidden=64, heads=4, vocab=256, seq=128)
        >>> held = device_memory(model, Layouts.of([Layout(zero=0), Layout(zero=0, tensor=2)]))
        >>> bool(held.total[0] > held.total[1])
        True
    """
    build = partial(rows_of, model, framework=framework, device=device)
    found = [_each_kind(rows, build, host_capacity) for rows in _in_cache(layouts)]
    columns = zip(*found, strict=True)
    return MemoryParts(*(np.concatenate(column) for column in columns))


def _in_cache(layouts: Layouts) -> Iterator[Layouts]:
    """Yield slices of the table that are small enough to be processed in a core's cache."""
    for start in range(0, max(1, len(layouts)), ROWS_AT_ONCE):
        yield _rows_at(layouts, slice(start, start + ROWS_AT_ONCE))


def _rows_at(layouts: Layouts, rows: slice | npt.NDArray[np.intp]) -> Layouts:
    columns: dict[str, Any] = {
        name: value[rows] if isinstance(value, np.ndarray) else value
        for name, value in layouts._asdict().items()
    }
    return Layouts(**columns)


Builder = Callable[[Layouts], LayoutRows]


def _each_kind(layouts: Layouts, build: Builder, host_capacity: float) -> MemoryParts:
    """Return the memory of the rank with the highest peak; layouts that gather whole units are computed separately."""
    rows = build(layouts)
    gathers = rows.gathers_units
    if not rows.has_units or gathers.all():
        return _fullest(layouts, rows, build, host_capacity)
    most = np.zeros((len(MemoryParts._fields), len(layouts)))
    for at in (np.flatnonzero(gathers), np.flatnonzero(~gathers)):
        if at.size:
            some = _rows_at(layouts, at)
            most[:, at] = _fullest(some, build(some), build, host_capacity)
    return MemoryParts(*most)


def _fullest(layouts: Layouts, rows: LayoutRows, build: Builder, host_capacity: float) -> MemoryParts:
    """Return the memory of the pipeline rank with the highest peak.

    Only these candidates are compared: the first rank, the last rank, and the first rank whose layers all have experts.
    With few micro-batches, the first ranks have no gradients yet when they keep the most activations, so the rank after
    them is a candidate too. Two more candidates are computed only for the few layouts that have them: in a V-shaped
    schedule with few micro-batches, where later ranks hold more micro-batches, the last rank with an additional layer,
    or the one before it if the last holds a micro-batch less; and the second rank if the first has one layer or
    micro-batch less, or in torch's pipelines that offload activations or split the backward pass: inner ranks receive
    most messages. Offloaded bytes are the maximum over all candidates, possibly from another rank.
    """
    model, pipeline = rows.model, rows.pipeline
    last = pipeline.ranks - 1
    if rows.has_units:  # not in a pipeline
        found = parts_of(blocks_of(rows, np.zeros_like(last)), rows, host_capacity)
        return MemoryParts(*(np.array(np.broadcast_to(part, len(layouts))) for part in found))
    places = [np.zeros_like(last), last]
    if model.mixture and model.mixture.dense_layers:
        per_rank = np.maximum(1.0, pipeline.layers)
        places.append(np.minimum(last, np.ceil(model.mixture.dense_layers / per_rank)))
    if rows.framework.keeps_gradients_from:
        places.append(first_with_gradients(pipeline))
    parts = [parts_of(blocks_of(rows, place), rows, host_capacity) for place in places]
    most = MemoryParts(*(np.array(np.broadcast_to(part, len(layouts))) for part in reduce(_larger, parts)))
    thirds = np.flatnonzero(pipeline.in_thirds)
    thirds = thirds[pipeline.ranks[thirds] % 3 == 2]
    second = np.union1d(thirds, np.flatnonzero(pipeline.ends))
    if rows.has_torch:
        is_inner = OFFLOADS_ACTIVATIONS[layouts.offload] | splits_backward(layouts)
        second = np.union1d(second, np.flatnonzero(rows.in_torch & is_inner))
    rest = pipeline.rest[thirds]
    for at, place in (
        (np.flatnonzero(pipeline.rounded & (pipeline.rest > 0)), pipeline.rest - 1),
        (thirds[(rest > 1) & (rest % 3 == 1)], pipeline.rest - 2),
        (second[pipeline.ranks[second] > 2], np.ones_like(last)),
    ):
        if at.size:
            some = build(_rows_at(layouts, at))
            here = parts_of(blocks_of(some, place[at]), some, host_capacity)
            larger = _larger(MemoryParts(*(part[at] for part in most)), here)
            for part, values in zip(most, larger, strict=True):
                part[at] = values
    return most


def _larger(one: MemoryParts, other: MemoryParts) -> MemoryParts:
    """Return the parts with the larger total on each row, and the larger offloaded bytes."""
    is_more = other.total > one.total
    on_device = (np.where(is_more, there, here) for here, there in zip(one[:5], other[:5], strict=True))
    away = (np.maximum(here, there) for here, there in zip(one[5:], other[5:], strict=True))
    return MemoryParts(*on_device, *away)


def parts_of(blocks: Blocks, rows: LayoutRows, host_capacity: float = np.inf) -> MemoryParts:
    """Return the bytes by type of memory, with offloaded blocks counted on the host instead of the device."""
    parameters = blocks.dense.parameters + blocks.experts.parameters
    optimizer = blocks.dense.optimizer + blocks.experts.optimizer
    offload, away = rows.layouts.offload, _saved_away(blocks, rows)
    peak = _peak(blocks, offload, away)
    buffers = peak.buffers + blocks.placeholders + blocks.workspace + blocks.received
    if not offload.any():
        return MemoryParts(
            parameters + peak.copies, peak.gradients, optimizer, peak.activations, buffers, NONE, NONE
        )
    no_optimizer, no_states = OFFLOADS_OPTIMIZER[offload], OFFLOADS_STATES[offload]
    states = optimizer * no_optimizer + (parameters + gradients_of(blocks)) * no_states
    host, nvme = tiers(states + away, host_capacity)
    return MemoryParts(
        parameters=parameters * ~no_states + peak.copies,
        gradients=peak.gradients,
        optimizer=optimizer * ~no_optimizer,
        activations=peak.activations,
        buffers=buffers,
        host=host,
        nvme=nvme,
    )


def peak_at(blocks: Blocks, rows: LayoutRows) -> Peak:
    """Return the peak of a rank, without offloaded data."""
    return _peak(blocks, rows.layouts.offload, _saved_away(blocks, rows))


def _peak(blocks: Blocks, offload: npt.NDArray[np.int64], away: Floats) -> Peak:
    if not offload.any():
        return peak_of(blocks, gradients_of(blocks), away, HERE)
    here = ~OFFLOADS_STATES[offload]
    return peak_of(blocks, gradients_of(blocks) * here, away, here)


def _saved_away(blocks: Blocks, rows: LayoutRows) -> Floats:
    """Return the bytes of saved activations that are offloaded."""
    offload = rows.layouts.offload
    if not offload.any():
        return NONE
    return np.asarray(np.maximum(blocks.saved - blocks.kept, 0.0) * OFFLOADS_ACTIVATIONS[offload])


def stage_memory(
    model: Transformer,
    layout: Layout,
    *,
    framework: str | Framework = "megatron-core",
    device: Device | None = None,
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Return the memory of one device in each of a layout's pipeline stages, as arrays by stage, in bytes.

    The arguments are the same as for `device_memory`, but for a single layout.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=4, hidden=64, heads=4, vocab=256, seq=128)
        >>> stage_memory(model, Layout(pipeline=4, global_batch=8)).activations.argmax()
        np.int64(0)
    """
    rows = rows_of(model, Layouts.of([layout] * layout.pipeline), framework, device)
    parts = parts_of(blocks_of(rows, np.arange(float(layout.pipeline))), rows, host_capacity)
    return MemoryParts(*(np.broadcast_to(part, layout.pipeline) for part in parts))
