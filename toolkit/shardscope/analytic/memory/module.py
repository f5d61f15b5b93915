"""The peak memory of one training step of a module, on one device of several that replicate or shard it.

The moments of the step at which most is alive say what is alive by what it grows with. To each is added what is
held all the time (`analytic.memory.held`) and what the strategy holds just then; the largest counts. With N ranks:

- one process holds gradients as the backward pass makes them (``zero_grad(set_to_none=True)``);
- **stage 0** on several (DistributedDataParallel) and **stage 1** hold gradients whole all the time, flat in buckets,
  into which those that arrive are added;
- **stages 2 and 3** hold shards, and beside them what `analytic.memory.fully_sharded` lists. A reduction that falls
  behind the backward pass keeps its buffer for longer; here each is over when the next unit's begins.

A loss that was not traced with the module is taken to be a cross-entropy, which adds the scores' log-softmax and two
gradients of their size, of the log-softmax and of the scores. The optimizer's step is one more moment: all gradients,
with nothing saved. The rules were found in the operations that `torch.distributed._tools.MemTracker` (torch 2.13, CPU)
lists, and are held against its peaks.

A traced module has its moments in `LayerTable.step`. For a table that nobody has traced a step of (a catalogue's, or a
module's whose backward pass does not run on shapes) two rules give them, found in the operations of torch's backward
passes as `torch.distributed._tools.MemTracker` (torch 2.13, CPU) lists them. Each layer of the backward pass holds

- as it begins, what it and the layers before it save, with two gradients of its output's size;
- as it ends, what the layers before it save, its own gradients, and the gradients of its input: one beside its output's
  for a single operation, three for a layer of several (its input branches: two arrive, and their sum).

What a module saves outside its layers is then taken to be freed last, and a layer's input to be of the size of the
output before it.
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
from shardscope.spec.model.table import Layer, LayerTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SINGLE_OPERATION_TENSORS = 2
"""A weight and a bias; a layer with more parameter tensors is several operations."""


class Moments(NamedTuple):
    """One row a moment; what is alive is in bytes, activations for one sample. Columns as in `Moment`."""

    phase: npt.NDArray[np.str_]
    unit: Ints
    done: Ints
    activations: Floats
    arriving: Floats
    own: Floats
    around: Floats
    unit_gradients: Floats
    """Bytes of the gradients of each unit, once all are there; shape `(units,)`, unit 0 first."""

    @property
    def in_place(self) -> Floats:
        """Gradients that their parameters have, where nothing is reduced on the way."""
        last = np.cumsum(np.concatenate([[0.0], self.unit_gradients[:0:-1]]))
        is_backward = np.isin(self.phase, ("turn", "backward", "leave"))
        whole: Floats = self.own + self.around + np.where(is_backward, last[self.done], 0.0)
        return whole


def moments_of(table: LayerTable, recompute: str, element_bytes: int = ELEMENT_BYTES) -> Moments:
    """The moments of a step of `table`; `element_bytes` are those of a parameter.

    Raises:
        SpecError: `recompute` is unknown, or needs a traced step and there is none.
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


def _by_rule(layers: Sequence[Layer]) -> Moments:
    inside = [layer for layer in layers if layer.output_bytes]
    outside = sum(layer.saved_bytes for layer in layers if not layer.output_bytes)
    saved = np.array([layer.saved_bytes for layer in inside])
    outputs = np.array([layer.output_bytes for layer in inside])
    inputs = np.concatenate([[0.0], outputs])[: len(inside)]  # the data needs no gradient
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
"""The loss and the number of rows that it averages over, while its backward pass runs."""
AT_THE_LOSS = 3
"""Tensors like the scores: their log-softmax, its gradient and theirs."""


class ModuleMemory(NamedTuple):
    """Bytes on one device."""

    parameters: float
    """Whole, or the shards with their padding."""
    gradients: float
    """Once all are there; whole, or the shards with their padding."""
    optimizer: float
    work: float
    """What the optimizer and the ring keep to work in."""
    activations: float
    """Saved for the backward pass, at most."""
    buffers: float
    """The module's own."""
    data: float
    """Inputs and targets."""
    alive: float
    """At the peak: activations, results and their gradients."""
    moving: float
    """At the peak: gradients of parameters, and parameters that are gathered."""

    @property
    def peak(self) -> float:
        """The most that is held at once over the step, all kinds together."""
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

    Recomputation and shards need a traced step; without one, the layers' own figures are used. What does not grow with
    the batch (BatchNorm's statistics, positions) is taken to: where it matters, trace on as many samples as `batch`.

    Args:
        table: Traced by `Model.from_module`, with ``memory=True`` for its step.
        batch: Samples of the device's step, at least 1.
        scores_bytes: Of the model's output, for one sample, where no loss was traced; None for what was.
        optimizer: Its name, an `Optimizer`, or the `OptimizerStates` that it keeps.
        data_bytes: Inputs and targets that are held all the time, for one sample.
        recompute: ``none``, ``selective`` or ``full``, as a job's.
        zero_stage: 0 to 3; from 1 as the strategies ``zero-1``, ``zero-2`` and ``zero-3`` with the ring do it.
        data_parallel: N, the devices that hold the model together.
        rank: Which of them; the first hold most where a cut is uneven.
        bucket_mb: MiB of a gradient bucket under stage 1.
        accumulates: Whether gradients of an earlier micro-batch are there from the start.
        element_bytes: Of one weight, and of its gradient and moments: 8 in fp64.

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
    """Gradients and gathered parameters at each moment."""
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
            "scores_bytes=None: nobody has traced a step of this table; give the bytes of the model's output for one "
            "sample"
        )
    return table.step.output_bytes
