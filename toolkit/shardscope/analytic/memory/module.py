"""The peak memory of one training step of a module, on one device of several that replicate or shard it.

The moments of the step (`analytic.memory.moments`) say what is alive by what it grows with. To each is added what is
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
"""

from __future__ import annotations

from typing import NamedTuple

from shardscope.analytic.memory.fully_sharded import beside_the_shards, units_of
from shardscope.analytic.memory.held import Sharding, check_sharding, held_of
from shardscope.analytic.memory.moments import ELEMENT_BYTES, Floats, Moments, moments_of
from shardscope.errors import SpecError
from shardscope.spec.layout_optimizer import AnyStates
from shardscope.spec.model.table import LayerTable

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
        raise SpecError(f"batch={batch} is no number of samples; give at least 1")
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
