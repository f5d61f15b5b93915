"""Bytes of every device of a layout, and of a million layouts at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.frameworks import Framework
from shardscope.analytic.memory.offload import (
    OFFLOADS_ACTIVATIONS,
    OFFLOADS_OPTIMIZER,
    OFFLOADS_STATES,
    tiers,
)
from shardscope.analytic.memory.rows import Floats, Rows, rows_of
from shardscope.analytic.memory.stage import NONE, Blocks, blocks_of
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

ROWS_AT_ONCE = 16384
"""Layouts whose arrays fit a core's cache together."""


class MemoryParts(NamedTuple):
    """Bytes by kind: five on the device, and what lies in the host's memory and on its drives for it."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    buffers: Floats
    host: Floats
    nvme: Floats

    @property
    def total(self) -> Floats:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def drive_share(self) -> Floats:
        """Of what is offloaded, the share that the host's memory has no room for; 0 where nothing is."""
        return np.asarray(self.nvme / np.maximum(self.host + self.nvme, 1.0))


def device_memory(
    model: Transformer,
    layouts: Layouts,
    *,
    framework: str | Framework = "megatron-core",
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Bytes on the fullest device of each layout.

    Args:
        model: The model.
        layouts: One layout or a million.
        framework: A key of `FRAMEWORKS`, or habits of your own.
        host_capacity: Bytes of the host's memory for one device; what is offloaded beyond it counts as `nvme`.

    Returns:
        Arrays of the length of `layouts`.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=2, hidden=64, heads=4, vocab=256, seq=128)
        >>> held = device_memory(model, Layouts.of([Layout(zero=0), Layout(zero=0, tensor=2)]))
        >>> bool(held.total[0] > held.total[1])
        True
    """
    found = [
        _of_length(len(rows), _fullest(model, rows, framework, host_capacity)) for rows in _in_cache(layouts)
    ]
    columns = zip(*found, strict=True)
    return MemoryParts(*(np.concatenate(column) for column in columns))


def _of_length(length: int, parts: MemoryParts) -> MemoryParts:
    return MemoryParts(*(np.broadcast_to(part, length) for part in parts))


def _in_cache(layouts: Layouts) -> Iterator[Layouts]:
    """The table in slices."""
    for start in range(0, max(1, len(layouts)), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        columns: dict[str, Any] = {
            name: value[rows] if isinstance(value, np.ndarray) else value
            for name, value in layouts._asdict().items()
        }
        yield Layouts(**columns)


def _fullest(
    model: Transformer, layouts: Layouts, framework: str | Framework, host_capacity: float
) -> MemoryParts:
    """The fullest of the ranks that can be it.

    They are the first, the last, and the first that has experts throughout; of a V with few micro-batches, where later
    ranks hold more of them, also the last rank that has a layer more. What is offloaded is the most that any of them
    offloads, which need not be the fullest.
    """
    rows = rows_of(model, layouts, framework)
    last = rows.pipeline.ranks - 1
    places = [np.zeros_like(last), last]
    if model.mixture and model.mixture.dense_layers:
        per_rank = np.maximum(1.0, rows.pipeline.layers)
        places.append(np.minimum(last, np.ceil(model.mixture.dense_layers / per_rank)))
    if (rows.pipeline.rounded & (rows.pipeline.rest > 0)).any():
        places.append(np.maximum(rows.pipeline.rest - 1, 0))
    most, *others = (parts_of(blocks_of(rows, place), rows, host_capacity) for place in places)
    for other in others:
        is_more = other.total > most.total
        pairs = zip(other, most, strict=True)
        host, nvme = np.maximum(other.host, most.host), np.maximum(other.nvme, most.nvme)
        most = MemoryParts(*(np.where(is_more, theirs, ours) for theirs, ours in pairs))
        most = most._replace(host=host, nvme=nvme)
    return most


def parts_of(blocks: Blocks, rows: Rows, host_capacity: float = np.inf) -> MemoryParts:
    """Blocks by kind, once what is offloaded has left."""
    parameters = blocks.dense.parameters + blocks.experts.parameters
    gradients = blocks.dense.gradients + blocks.experts.gradients
    optimizer = blocks.dense.optimizer + blocks.experts.optimizer
    activations = blocks.saved + blocks.embedding_mask
    buffers = np.maximum(blocks.at_loss, blocks.in_layer) + blocks.gathered + blocks.bucket
    buffers += blocks.placeholders + blocks.workspace
    on_device = MemoryParts(
        parameters + blocks.copies, gradients, optimizer, activations, buffers, NONE, NONE
    )
    offload = rows.layouts.offload
    if not offload.any():
        return on_device
    no_optimizer, no_states = OFFLOADS_OPTIMIZER[offload], OFFLOADS_STATES[offload]
    saved_away = (blocks.saved - blocks.kept) * OFFLOADS_ACTIVATIONS[offload]
    host, nvme = tiers(
        optimizer * no_optimizer + (parameters + gradients) * no_states + saved_away, host_capacity
    )
    here = ~no_states
    return MemoryParts(
        parameters=on_device.parameters * here,
        gradients=gradients * here,
        optimizer=optimizer * ~no_optimizer,
        activations=activations - saved_away,
        buffers=buffers,
        host=host,
        nvme=nvme,
    )


def stage_memory(
    model: Transformer,
    layout: Layout,
    *,
    framework: str | Framework = "megatron-core",
    host_capacity: float = np.inf,
) -> MemoryParts:
    """Bytes on a device of every pipeline stage of one layout; arrays by stage.

    Example:
        >>> from shardscope.spec.model import Model
        >>> model = Model.transformer(layers=4, hidden=64, heads=4, vocab=256, seq=128)
        >>> stage_memory(model, Layout(pipeline=4, global_batch=8)).activations.argmax()
        np.int64(0)
    """
    rows = rows_of(model, Layouts.of([layout] * layout.pipeline), framework)
    parts = parts_of(blocks_of(rows, np.arange(float(layout.pipeline))), rows, host_capacity)
    return MemoryParts(*(np.broadcast_to(part, layout.pipeline) for part in parts))
