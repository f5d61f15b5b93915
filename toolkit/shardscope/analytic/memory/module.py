"""Peak memory of one training step of a module, on one of the devices over which it is replicated or sharded.

A traced step lists the moments at which memory may peak, with the bytes alive at each. The bytes held throughout the
step (`analytic.memory.held`) and those that the strategy holds at that moment are added to each; the largest sum is
the peak. With N ranks:

- one process holds gradients as the backward pass makes them (``zero_grad(set_to_none=True)``);
- **stage 0** on several ranks (DistributedDataParallel) and **stage 1** always hold whole gradients, flat in buckets,
  to which new gradients are added;
- **stages 2 and 3** hold shards, and in addition what `analytic.memory.fully_sharded` lists. A reduction that lags
  behind the backward pass keeps its buffer for longer; here each is assumed to end before the next unit's starts.

A loss that was not traced with the module is assumed to be a cross-entropy, which adds the log-softmax of the scores
and two gradients of the same size, of the log-softmax and of the scores. The optimizer's step is one more moment: all
gradients, and no saved activations. The rules come from the operations that `torch.distributed._tools.MemTracker`
(torch 2.13, CPU) lists, and are checked against its peaks.

A traced module has its moments in `LayerTable.step`. For a table without a traced step (from the catalogue, or of a
module whose backward pass does not run on shapes) two rules give them, which come from the operations of torch's
backward passes in the same tracker. Each layer of the backward pass holds

- at its start, what it and the layers before it save, with two gradients of its output's size;
- at its end, what the layers before it save, its own gradients, and gradients of its input: one in addition to its
  output's for a single operation, three for a layer of several operations (its input branches: two gradients and their
  sum).

What a module saves outside its layers is then assumed to be freed last, and a layer's input to have the size of the
preceding layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.fully_sharded import beside_the_shards, units_of
from shardscope.analytic.memory.held import ELEMENT_BYTES, Sharding, check_sharding, held_of, not_traced
from shardscope.errors import SpecError
from shardscope.spec.layout_optimizer import AnyStates
from shardscope.spec.model.step import RECOMPUTE_MODES, Moment, Phase
from shardscope.spec.model.table import LayerRow, LayerTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SINGLE_OPERATION_TENSORS = 2
"""A weight and a bias; a layer with more parameter tensors is several operations."""


class Moments(NamedTuple):
    """The moments of a step as columns, named as in `Moment`; activations are for one sample."""

    phase: npt.NDArray[np.str_]
    unit: Ints
    done: Ints
    activations: Floats
    arriving: Floats
    own: Floats
    around: Floats
    unit_gradients: Floats
    """Bytes of each unit's gradients after all have been computed; shape `(units,)`, unit 0 first."""

    @property
    def in_place(self) -> Floats:
        """Bytes of the gradients at each moment, if no gradients are reduced during the backward pass."""
        last = np.cumsum(np.concatenate([[0.0], self.unit_gradients[:0:-1]]))
        is_backward = np.isin(self.phase, ("turn", "backward", "leave"))
        whole: Floats = self.own + self.around + np.where(is_backward, last[self.done], 0.0)
        return whole


def moments_of(table: LayerTable, recompute: str, element_bytes: int = ELEMENT_BYTES) -> Moments:
    """Return the moments of a step of `table`, whose parameters take `element_bytes` each.

    Raises:
        SpecError: `recompute` is unknown, or needs a traced step and the table has none.
    """
    if recompute not in RECOMPUTE_MODES:
        raise SpecError(
            f"recompute={recompute!r} is not a recomputation mode; use {', '.join(map(repr, RECOMPUTE_MODES))}"
        )
    if table.step is None:
        if recompute != "none":
            raise not_traced(f"recompute={recompute!r}")
        return _by_rule(table.layers)
    gradients = np.zeros(len(table.step.units))
    for row in table.step.parameters:
        gradients[row.unit] += element_bytes * row.num_elements * row.is_trained
    return _columns(table.step.moments[recompute], gradients)


def _columns(rows: Sequence[Moment], gradients: Floats) -> Moments:
    return Moments(
        phase=np.array([row.phase for row in rows]),
        unit=np.array([row.unit for row in rows]),
        done=np.array([row.done for row in rows]),
        activations=np.array([row.activations for row in rows]),
        arriving=np.array([row.arriving for row in rows]),
        own=np.array([row.own for row in rows]),
        around=np.array([row.around for row in rows]),
        unit_gradients=gradients,
    )


def _by_rule(layers: Sequence[LayerRow]) -> Moments:
    inside = [layer for layer in layers if layer.output_bytes]
    outside = sum(layer.saved_bytes for layer in layers if not layer.output_bytes)
    saved = np.array([layer.saved_bytes for layer in inside])
    outputs = np.array([layer.output_bytes for layer in inside])
    inputs = np.concatenate([[0.0], outputs])[: len(inside)]  # the data does not need a gradient
    gradients = ELEMENT_BYTES * np.array([0.0, *(layer.num_params for layer in inside)])
    several = np.array([layer.num_tensors > SINGLE_OPERATION_TENSORS for layer in inside])
    up_to = np.cumsum(saved)
    begins = outside + up_to + 2 * outputs
    ends = outside + up_to - saved + np.where(several, 3 * inputs, inputs + outputs)
    number, nothing = np.arange(1, len(inside) + 1), np.zeros(1 + 2 * len(inside))
    turns: list[Phase] = ["turn"] * len(inside)
    leaves: list[Phase] = ["leave"] * len(inside)
    unit = np.concatenate([[0], number, number])
    return Moments(
        phase=np.array(["loss", *turns, *leaves]),
        unit=unit,
        done=np.where(unit > 0, len(inside) - unit, 0),
        activations=np.concatenate([[outside + saved.sum()], begins, ends]),
        arriving=nothing,
        own=np.concatenate([np.zeros(1 + len(inside)), gradients[1:]]),
        around=nothing,
        unit_gradients=gradients,
    )


LOSS_BYTES = 8
"""Bytes of the loss and of the number of rows that it averages over, during its backward pass."""
AT_THE_LOSS = 3
"""Number of tensors with the size of the scores: their log-softmax, and the gradients of scores and log-softmax."""


class ModuleMemory(NamedTuple):
    """Bytes on one device, by kind."""

    parameters: float
    """Bytes of the full parameters, or of the shards with padding."""
    gradients: float
    """Bytes of the gradients after all have been computed: full gradients, or shards with padding."""
    optimizer: float
    work: float
    """Bytes of work buffers of the optimizer and of the ring."""
    activations: float
    """Maximum bytes saved for the backward pass."""
    buffers: float
    """Bytes of the module's own buffers."""
    data: float
    """Bytes of inputs and targets."""
    alive: float
    """Bytes of activations, results and their gradients at the peak."""
    moving: float
    """Bytes of parameter gradients and gathered parameters at the peak."""

    @property
    def peak(self) -> float:
        """Peak memory of the step in bytes, over all kinds."""
        held = self.parameters + self.optimizer + self.work + self.buffers + self.data
        return held + self.alive + self.moving


def module_memory(
    table: LayerTable,
    *,
    batch: int,
    scores_bytes: float | None = None,
    optimizer: AnyStates = "adamw",
    data_bytes: float = 0.0,
    recompute: str = "none",
    zero_stage: int = 0,
    data_parallel: int = 1,
    rank: int = 0,
    bucket_mb: float = 25.0,
    accumulates: bool = False,
    element_bytes: int = ELEMENT_BYTES,
) -> ModuleMemory:
    """Memory of one training step, on one of `data_parallel` devices.

    Recomputation and shards need a traced step; without one, the values in the table's layers are used. Bytes that do
    not grow with the batch (BatchNorm's statistics, positions) are scaled with it nevertheless. If that matters, trace
    with `batch` samples.

    Args:
        table: Traced by `Model.from_module`, with ``memory=True`` for its step.
        batch: Samples per step on the device, at least 1.
        scores_bytes: Bytes of the model's output for one sample, if no loss was traced; None for the traced size.
        optimizer: Name of the optimizer, an `Optimizer`, or its `OptimizerStates`.
        data_bytes: Bytes of the inputs and targets of one sample, held throughout the step.
        recompute: ``none``, ``selective`` or ``full``, as in a job.
        zero_stage: 0 to 3; 1 to 3 as in the strategies ``zero-1``, ``zero-2`` and ``zero-3`` with the ring.
        data_parallel: N, the number of devices that replicate or shard the model.
        rank: Rank of the device; the first ranks hold the most if sharding is uneven.
        bucket_mb: Size of a gradient bucket in MiB, in stage 1.
        accumulates: Whether gradients of an earlier micro-batch exist from the start.
        element_bytes: Bytes of one weight, of one gradient element and of one optimizer moment: 8 in fp64.

    Raises:
        SpecError: A field is outside its range, or needs a traced step where there is none.

    Example:
        >>> from shardscope.spec.model import Model
        >>> held = module_memory(Model.of("resnet-50"), batch=32, scores_bytes=4000)
        >>> round(held.peak / held.activations, 2)
        1.15
    """
    if batch < 1:
        raise SpecError(f"batch={batch} is not a number of samples; give at least 1")
    sharding = Sharding(zero_stage, data_parallel, rank, bucket_mb, element_bytes)
    check_sharding(sharding)
    held, moments = held_of(table, optimizer, sharding), moments_of(table, recompute, element_bytes)
    alive, saved = batch * moments.activations, table.step.saved_bytes.get(recompute) if table.step else None
    if saved is None:
        at_loss = moments.phase == "loss"
        scores = _scores_bytes(table) if scores_bytes is None else scores_bytes
        alive += (batch * AT_THE_LOSS * scores + LOSS_BYTES) * at_loss
        saved = float(moments.activations[at_loss][0]) + scores + LOSS_BYTES / batch
    whole = _of_parameters(table, moments, sharding, accumulates=accumulates)
    fullest = int((alive + whole).argmax())
    at_peak = float(alive[fullest]), float(whole[fullest])
    if sum(at_peak) < held.gradients:  # the optimizer's step
        at_peak = 0.0, held.gradients
    return ModuleMemory(
        held.parameters, held.gradients, held.optimizer, held.work, batch * saved, held.buffers, batch * data_bytes,
        *at_peak,
    )  # fmt: skip


def _of_parameters(table: LayerTable, moments: Moments, sharding: Sharding, *, accumulates: bool) -> Floats:
    """Bytes of gradients and gathered parameters at each moment."""
    if sharding.stage < 2:
        keeps = sharding.keeps_gradients or accumulates
        whole: Floats = moments.arriving + (moments.unit_gradients.sum() if keeps else moments.in_place)
        return whole
    assert table.step is not None
    units = units_of(table.step, sharding.ranks, sharding.element_bytes)
    return beside_the_shards(
        moments, units, stage=sharding.stage, ranks=sharding.ranks, accumulates=accumulates
    )


def _scores_bytes(table: LayerTable) -> float:
    if table.step is None:
        raise SpecError(
            "scores_bytes=None needs a traced step, which this table lacks; give the bytes of the "
            "model's output for one sample"
        )
    return table.step.output_bytes
