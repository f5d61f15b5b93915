"""Memory per device in bytes, for one layout or for a million layouts at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.moments import Peak, gradients_of, peak_of
from shardscope.analytic.memory.offload import (
    OFFLOADS_ACTIVATIONS,
    OFFLOADS_OPTIMIZER,
    OFFLOADS_STATES,
    tiers,
)
from shardscope.analytic.memory.rows import Floats, LayoutRows, first_with_gradients, rows_of
from shardscope.analytic.memory.stage import NONE, Blocks, blocks_of
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
        """Fraction of the offloaded bytes that is on drives, not in host memory; 0 if nothing is offloaded."""
        return np.asarray(self.nvme / np.maximum(self.host + self.nvme, 1.0))


def device_memory(
    model: Transformer,
    layouts: Layouts,
    *,
    framework: str | Framework = "megatron-core",
    device: Device | None = None,
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Return the memory of the device that needs the most, for each layout.

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
    found = [
        _of_length(len(rows), _fullest(rows_of(model, rows, framework, device), host_capacity))
        for rows in _in_cache(layouts)
    ]
    columns = zip(*found, strict=True)
    return MemoryParts(*(np.concatenate(column) for column in columns))


def _of_length(length: int, parts: MemoryParts) -> MemoryParts:
    """Return the parts with every array broadcast to this length."""
    return MemoryParts(*(np.broadcast_to(part, length) for part in parts))


def _in_cache(layouts: Layouts) -> Iterator[Layouts]:
    """Yield slices of the table that are small enough to be processed in a core's cache."""
    for start in range(0, max(1, len(layouts)), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        columns: dict[str, Any] = {
            name: value[rows] if isinstance(value, np.ndarray) else value
            for name, value in layouts._asdict().items()
        }
        yield Layouts(**columns)


def _fullest(rows: LayoutRows, host_capacity: float) -> MemoryParts:
    """Return the memory of the pipeline rank that needs the most.

    Only these candidates are compared: the first rank, the last, and the first rank whose layers all have experts. In a
    V-shaped schedule with few micro-batches, later ranks hold more micro-batches, so the last rank with one layer more
    than others is a candidate too, as is the second rank if the first has one layer or micro-batch less. With few
    micro-batches, the first ranks have no gradients yet as they keep the most activations, so the one next to them is a
    candidate too. Offloaded bytes are the maximum over all candidates, possibly from another rank.
    """
    model = rows.model
    last = rows.pipeline.ranks - 1
    places = [np.zeros_like(last), last]
    if model.mixture and model.mixture.dense_layers:
        per_rank = np.maximum(1.0, rows.pipeline.layers)
        places.append(np.minimum(last, np.ceil(model.mixture.dense_layers / per_rank)))
    if (rows.pipeline.rounded & (rows.pipeline.rest > 0)).any():
        places.append(np.maximum(rows.pipeline.rest - 1, 0))
    if (rows.pipeline.ends | rows.pipeline.in_thirds).any():
        places.append(np.minimum(last, 1.0))
    if rows.framework.keeps_gradients_from:
        places.append(first_with_gradients(rows.pipeline))
    most, *others = (parts_of(blocks_of(rows, place), rows, host_capacity) for place in places)
    for other in others:
        is_more = other.total > most.total
        pairs = zip(other, most, strict=True)
        host, nvme = np.maximum(other.host, most.host), np.maximum(other.nvme, most.nvme)
        most = MemoryParts(*(np.where(is_more, theirs, ours) for theirs, ours in pairs))
        most = most._replace(host=host, nvme=nvme)
    return most


def parts_of(blocks: Blocks, rows: LayoutRows, host_capacity: float = np.inf) -> MemoryParts:
    """Return the bytes by type of memory, with offloaded blocks counted on the host instead of the device."""
    parameters = blocks.dense.parameters + blocks.experts.parameters
    optimizer = blocks.dense.optimizer + blocks.experts.optimizer
    peak, offload = peak_at(blocks, rows), rows.layouts.offload
    buffers = peak.buffers + blocks.placeholders + blocks.workspace
    if not offload.any():
        return MemoryParts(
            parameters + peak.copies, peak.gradients, optimizer, peak.activations, buffers, NONE, NONE
        )
    no_optimizer, no_states = OFFLOADS_OPTIMIZER[offload], OFFLOADS_STATES[offload]
    states = optimizer * no_optimizer + (parameters + gradients_of(blocks)) * no_states
    host, nvme = tiers(states + _saved_away(blocks, rows), host_capacity)
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
    """Return the peak of a rank, without what it offloads."""
    offload = rows.layouts.offload
    if not offload.any():
        return peak_of(blocks, gradients_of(blocks), NONE, HERE)
    here = ~OFFLOADS_STATES[offload]
    return peak_of(blocks, gradients_of(blocks) * here, _saved_away(blocks, rows), here)


def _saved_away(blocks: Blocks, rows: LayoutRows) -> Floats:
    return np.asarray((blocks.saved - blocks.kept) * OFFLOADS_ACTIVATIONS[rows.layouts.offload])


def stage_memory(
    model: Transformer,
    layout: Layout,
    *,
    framework: str | Framework = "megatron-core",
    device: Device | None = None,
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Return the memory of one device in each of a layout's pipeline stages, as arrays by stage, in bytes.

    The arguments are those of `device_memory`, but for a single layout.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=4, hidden=64, heads=4, vocab=256, seq=128)
        >>> stage_memory(model, Layout(pipeline=4, global_batch=8)).activations.argmax()
        np.int64(0)
    """
    rows = rows_of(model, Layouts.of([layout] * layout.pipeline), framework, device)
    parts = parts_of(blocks_of(rows, np.arange(float(layout.pipeline))), rows, host_capacity)
    return MemoryParts(*(np.broadcast_to(part, layout.pipeline) for part in parts))
