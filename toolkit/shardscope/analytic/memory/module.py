"""Peak memory of one training step of a module, on one of the devices that replicate or shard it.

A traced step lists the moments at which memory may peak, with the bytes of activations and gradients at each.
The memory at a moment is the sum of these bytes, the bytes held throughout the step (`analytic.memory.held`),
and the bytes that the strategy holds at that moment. The largest sum is the peak.

- A single process holds the gradients that the backward pass has computed so far (``zero_grad(set_to_none=True)``).
- **Stage 0** on several ranks (DistributedDataParallel) and **stage 1** hold whole gradients throughout the step, in
  flat buckets to which new gradients are added.
- **Stages 2 and 3** hold shards, and in addition the bytes described in `analytic.memory.fully_sharded`. A reduction is
  assumed to end before that of the next unit starts; one that takes longer would keep its buffer longer.

A loss that was not traced with the module is assumed to be a cross-entropy. It adds three tensors of the size of the
scores: their log-softmax, and the gradients of scores and log-softmax. The optimizer's step is a further moment, with
all gradients but no saved activations. These rules were derived from the operations that
`torch.distributed._tools.MemTracker` (torch 2.13, CPU) records, and are tested against the peaks it reports.

The moments of a traced module are in `LayerTable.step`. Some tables have no traced step: those from the catalogue, and
those of modules whose backward pass cannot be run on tensor shapes alone. For these, two moments of each layer's
backward pass are estimated, by rules derived with the same tracker:

- At its start, memory holds the tensors saved by this layer and the layers before it, and two gradients of the size of
  its output.
- At its end, memory holds the tensors saved by the layers before it, the gradients of its parameters, and gradients of
  activations. A layer of a single operation has one gradient of its output and one of its input. A layer of several
  operations has three of its input, because the input is used twice: two gradients and their sum.

Without a traced step, tensors that a module saves outside its layers are assumed to be freed last, and a layer's input
is assumed to have the size of the preceding layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.memory.fully_sharded import (
    Units,
    gathered_tensors,
    units_of,
    units_with_experts,
    unsharded_bytes,
)
from shardscope.analytic.memory.held import ELEMENT_BYTES, Sharding, check_sharding, held_of, not_traced
from shardscope.errors import SpecError
from shardscope.spec.layout_optimizer import AnyStates
from shardscope.spec.model.step import RECOMPUTE_MODES, Phase, StepTrace
from shardscope.spec.model.table import LayerRow, LayerTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SINGLE_OPERATION_TENSORS = 2
"""Number of parameter tensors, a weight and a bias, above which a layer counts as several operations."""


class Moments(NamedTuple):
    """The moments of a step as arrays, one for each field of `Moment`; activations are those of one sample."""

    phase: npt.NDArray[np.str_]
    unit: Ints
    done: Ints
    activations: Floats
    arriving: Floats
    own: Floats
    around: Floats
    saved: Floats
    unit_gradients: Floats
    """Bytes of each unit's gradients at the end of the backward pass; shape `(units,)`, with unit 0 first."""

    @property
    def in_place(self) -> Floats:
        """Bytes of parameter gradients at each moment, if none are reduced or freed during the backward pass."""
        whole: Floats = self.own + self.around + self._of_finished(self.unit_gradients)
        return whole

    def at_most_in_place(self, of_units: Floats) -> Floats:
        """Return the most bytes of some of the gradients at each moment, given their bytes in each unit."""
        running = np.minimum(self.own, of_units[self.unit]) + np.minimum(self.around, of_units[0])
        whole: Floats = running + self._of_finished(of_units)
        return whole

    def _of_finished(self, of_units: Floats) -> Floats:
        """Return the bytes of gradients in units that have finished their backward pass, at each moment."""
        last = np.cumsum(np.concatenate([[0.0], of_units[:0:-1]]))
        is_backward = np.isin(self.phase, ("turn", "backward", "leave"))
        whole: Floats = np.where(is_backward, last[self.done], 0.0)
        return whole


def moments_of(table: LayerTable, recompute: str, element_bytes: int = ELEMENT_BYTES) -> Moments:
    """Return the moments of a step of the module described by `table`.

    Args:
        table: Description of the module, with or without a traced step.
        recompute: ``none``, ``selective`` or ``full``.
        element_bytes: Bytes of one parameter.

    Raises:
        SpecError: `recompute` is unknown, or it is not ``none`` and the table has no traced step.
    """
    if recompute not in RECOMPUTE_MODES:
        raise SpecError(
            f"recompute={recompute!r} is not a recomputation mode; use {', '.join(map(repr, RECOMPUTE_MODES))}"
        )
    if table.step is None:
        if recompute != "none":
            raise not_traced(f"recompute={recompute!r}")
        return _by_rule(table.layers)
    return _traced(table.step, recompute, element_bytes)


def _traced(step: StepTrace, recompute: str, element_bytes: int) -> Moments:
    gradients = np.zeros(len(step.units))
    for row in step.parameters:
        gradients[row.unit] += element_bytes * row.num_elements * row.is_trained
    rows = step.moments[recompute]
    return Moments(
        phase=np.array([row.phase for row in rows]),
        unit=np.array([row.unit for row in rows]),
        done=np.array([row.done for row in rows]),
        activations=np.array([row.activations for row in rows]),
        arriving=np.array([row.arriving for row in rows]),
        own=np.array([row.own for row in rows]),
        around=np.array([row.around for row in rows]),
        saved=np.array([row.saved for row in rows]),
        unit_gradients=gradients,
    )


def _by_rule(layers: Sequence[LayerRow]) -> Moments:
    """Return the moments estimated by the rules in the module docstring, for a table without a traced step."""
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
        saved=nothing,
        unit_gradients=gradients,
    )


LOSS_BYTES = 8
"""Bytes of two scalars during the loss's backward pass: the loss, and the number of rows that it averages over."""
AT_THE_LOSS = 3
"""Number of tensors with the size of the scores: their log-softmax, and the gradients of scores and log-softmax."""


class ModuleMemory(NamedTuple):
    """Memory of one device in a training step, in bytes."""

    parameters: float
    """Bytes of full parameters, or of padded shards."""
    gradients: float
    """Bytes of all gradients at the end of the backward pass: of full gradients, or of padded shards."""
    optimizer: float
    work: float
    """Bytes of the work buffers of the optimizer and the ring."""
    activations: float
    """Maximum bytes saved for the backward pass."""
    buffers: float
    """Bytes of the module's buffers, such as running statistics."""
    data: float
    """Bytes of inputs and targets."""
    alive: float
    """Bytes of activations and their gradients at the peak."""
    moving: float
    """Bytes of parameter gradients and gathered parameters at the peak."""

    @property
    def peak(self) -> float:
        """Peak memory of the step, in bytes."""
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
    late_gradients: Sequence[float] = (),
    shares_buffers: bool = False,
    expert_ranks: int | None = None,
) -> ModuleMemory:
    """Return the memory of one training step on one of `data_parallel` devices.

    Recomputation and ZeRO need a traced step. Without one, memory is estimated from the layers in the table.
    Activations are assumed to be proportional to the batch size, although some, such as BatchNorm's statistics, are
    not. If this matters, trace the module with `batch` samples.

    Args:
        table: Description of the module, from the catalogue or from `Model.from_module`, which also traces a step if
            called with ``memory=True``.
        batch: Number of samples per step on the device, at least 1.
        scores_bytes: Bytes of the model's output for one sample, used if no loss was traced; None to use the traced
            size.
        optimizer: Name of the optimizer, an `Optimizer`, or its `OptimizerStates`.
        data_bytes: Bytes of the inputs and targets of one sample, which are held throughout the step.
        recompute: ``none``, ``selective`` or ``full``, as in a job.
        zero_stage: 0 for replicas; 1 to 3 for the strategies ``zero-1``, ``zero-2`` and ``zero-3`` over the ring.
        data_parallel: N, the number of devices that replicate or shard the model.
        rank: Rank of the device; if shards are uneven, the first ranks hold the most.
        bucket_mb: Size of a gradient bucket in MiB, in stage 1.
        accumulates: Whether gradients from an earlier micro-batch exist at the start.
        element_bytes: Bytes of one element of a weight, a gradient or an optimizer moment; 8 in fp64.
        late_gradients: Bytes of gradients in each unit that are in no bucket, so that only the backward pass allocates
            them, in stage 0; empty if all are in buckets.
        shares_buffers: Whether ranks exchange units in shared buffers, in stages 2 and 3, whose bytes are counted
            separately.
        expert_ranks: Number of devices over which experts are sharded, in stages 2 and 3, if it is another one.

    Raises:
        SpecError: An argument is out of range, or needs a traced step that the table does not have.

    Example:
        >>> from shardscope.spec.model import Model
        >>> held = module_memory(Model.of("resnet-50"), batch=32, scores_bytes=4000)
        >>> round(held.peak / held.activations, 2)
        1.12
    """
    if batch < 1:
        raise SpecError(f"batch={batch} is too small; give at least 1 sample")
    sharding = Sharding(zero_stage, data_parallel, rank, bucket_mb, element_bytes, expert_ranks=expert_ranks)
    check_sharding(sharding)
    held, moments = held_of(table, optimizer, sharding), moments_of(table, recompute, element_bytes)
    alive, saved = batch * moments.activations, table.step.saved_bytes.get(recompute) if table.step else None
    if saved is None:
        at_loss = moments.phase == "loss"
        scores = _scores_bytes(table) if scores_bytes is None else scores_bytes
        alive += (batch * AT_THE_LOSS * scores + LOSS_BYTES) * at_loss
        saved = float(moments.activations[at_loss][0]) + scores + LOSS_BYTES / batch
    whole = _of_parameters(
        table, moments, sharding, recompute=recompute, accumulates=accumulates, shares=shares_buffers
    )
    if late_gradients:
        late = np.asarray(late_gradients)
        whole = whole - late.sum() + moments.at_most_in_place(late)
    fullest = int((alive + whole).argmax())
    at_peak = float(alive[fullest]), float(whole[fullest])
    if sum(at_peak) < held.gradients:  # the optimizer's step
        at_peak = 0.0, held.gradients
    return ModuleMemory(
        held.parameters, held.gradients, held.optimizer, held.work, batch * saved, held.buffers, batch * data_bytes,
        *at_peak,
    )  # fmt: skip


def saved_and_gathered(step: StepTrace, *, batch: float, recompute: str, sharding: Sharding) -> float:
    """Return the most bytes of saved activations and gathered parameters that exist together, in stages 2 and 3.

    A run records the same quantity; it excludes intermediate results, gradients and communication buffers.

    Args:
        step: A traced step.
        batch: Number of samples in a micro-batch.
        recompute: ``none``, ``selective`` or ``full``.
        sharding: How the model is sharded.
    """
    moments = _traced(step, recompute, sharding.element_bytes)
    sizes = gathered_sizes(step, recompute=recompute, sharding=sharding)
    return float((batch * moments.saved + gathered_tensors(moments, sizes, sharding.stage)).max())


def gathered_sizes(step: StepTrace, *, recompute: str, sharding: Sharding) -> Floats:
    """Return the most bytes of each unit's parameters that are gathered at once, with unit 0 first; see
    `saved_and_gathered`.
    """
    return np.asarray(sum(units.gathered for units, _ in _units(step, recompute, sharding)))


def _units(step: StepTrace, recompute: str, sharding: Sharding) -> list[tuple[Units, int]]:
    """Return the sizes of units, and the number of ranks over which they are sharded; those of experts apart."""
    ranks, width = sharding.ranks, sharding.element_bytes
    if sharding.expert_ranks is None:
        return [(units_of(step, ranks, width), ranks)]
    at_once = sharding.stage == _KEEPS_GATHERED or recompute == "full"
    dense, experts = units_with_experts(step, ranks, sharding.expert_ranks, width, at_once=at_once)
    return [(dense, ranks), (experts, sharding.expert_ranks)]


_KEEPS_GATHERED = 2
"""ZeRO stage that keeps units gathered."""


def _of_parameters(
    table: LayerTable,
    moments: Moments,
    sharding: Sharding,
    *,
    recompute: str,
    accumulates: bool,
    shares: bool,
) -> Floats:
    """Return the bytes of parameter gradients and gathered parameters at each moment."""
    if sharding.stage < 2:
        keeps = sharding.keeps_gradients or accumulates
        whole: Floats = moments.arriving + (moments.unit_gradients.sum() if keeps else moments.in_place)
        return whole
    assert table.step is not None
    held = [
        unsharded_bytes(
            moments, units, stage=sharding.stage, ranks=ranks, accumulates=accumulates, shares_buffers=shares
        )
        for units, ranks in _units(table.step, recompute, sharding)
    ]
    return np.asarray(sum(held))


def _scores_bytes(table: LayerTable) -> float:
    """Return the traced bytes of the model's output for one sample.

    Raises:
        SpecError: The table has no traced step.
    """
    if table.step is None:
        raise SpecError(
            "scores_bytes=None needs a traced step, which this table lacks; give the bytes of the "
            "model's output for one sample"
        )
    return table.step.output_bytes
