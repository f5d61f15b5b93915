"""The peak memory of one training step of a traced module, from the table of its layers.

Three kinds of instants can be the peak, and the largest counts. The rules were found in the operations of torch's
backward passes as `torch.distributed._tools.MemTracker` (torch 2.x, CPU) lists them, and are held against its peaks:

- the loss: all that the layers save, the log-softmax of the scores, and two gradients of their size, of the log-softmax
  and of the scores;
- each layer of the backward pass: what it and the layers before it save with two gradients of its output's size, or,
  as it ends, what the layers before it save, its weights' gradients with those of all layers after it, and the
  gradients of its input: one beside its output's for a single operation, three for a layer of several (its input
  branches: two arrive, and their sum);
- the optimizer's step: all gradients, with nothing saved.

Gradients do not exist before the backward pass makes them (``zero_grad(set_to_none=True)``). What a module saves
outside its layers is taken to be freed last, and a layer's input to be of the size of the output before it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardscope.analytic.memory.states import model_states
from shardscope.errors import SpecError
from shardscope.spec.model.table import Layer, LayerTable

WORK_TENSORS: MappingProxyType[str, int] = MappingProxyType({"lamb": 1, "lars": 1})
"""Buffers like all parameters together that our layerwise optimizers keep to work in; 0 for any other."""
SINGLE_OPERATION_TENSORS = 2
"""A weight and a bias; a layer with more parameter tensors is several operations."""
LOSS_BYTES = 8
"""The loss and the number of rows that it averages over, while its backward pass runs."""


class ModuleMemory(NamedTuple):
    """Bytes on one device in float32."""

    parameters: float
    gradients: float
    """Once all are there."""
    optimizer: float
    work: float
    """What the optimizer keeps to work in."""
    activations: float
    """Saved for the backward pass, at the end of the forward pass and its loss."""
    peak: float
    """The most that is held at once over the step, all kinds together."""


def module_memory(
    table: LayerTable, *, batch: int, scores_bytes: float, optimizer: str = "adamw", data_bytes: float = 0.0
) -> ModuleMemory:
    """Memory of one float32 training step with cross-entropy on one device, nothing recomputed.

    Args:
        table: Traced by `Model.from_module`.
        batch: Samples of the step, at least 1.
        scores_bytes: Of the model's output, for one sample.
        optimizer: A key of `STATES`.
        data_bytes: Inputs and targets that are held all the time, for one sample.

    Raises:
        SpecError: `batch` is below 1, or the optimizer is unknown.
    """
    if batch < 1:
        raise SpecError(f"batch={batch} is no number of samples; give at least 1")
    states = model_states(table.num_params, optimizer=optimizer, num_tensors=table.num_tensors)
    parameters, gradients, kept = (float(part) for part in states)
    work = WORK_TENSORS.get(optimizer, 0) * parameters
    activations = batch * (table.saved_bytes + scores_bytes) + LOSS_BYTES
    held = parameters + kept + work + batch * data_bytes
    at_the_loss = activations + 2 * batch * scores_bytes
    peak = held + max(at_the_loss, _in_the_backward_pass(table.layers, batch), gradients)
    return ModuleMemory(parameters, gradients, kept, work, activations, peak)


def _in_the_backward_pass(layers: tuple[Layer, ...], batch: int) -> float:
    """The most that is saved, already a weight's gradient, or a gradient on its way, in bytes."""
    inside = [layer for layer in layers if layer.output_bytes]
    outside = sum(layer.saved_bytes for layer in layers if not layer.output_bytes)
    if not inside:
        return 0.0
    saved = np.array([layer.saved_bytes for layer in inside])
    outputs = np.array([layer.output_bytes for layer in inside])
    inputs = np.concatenate([[0.0], outputs[:-1]])  # the data needs no gradient
    gradients = 4.0 * np.array([layer.num_params for layer in inside])
    several = np.array([layer.num_tensors > SINGLE_OPERATION_TENSORS for layer in inside])
    up_to, from_here = np.cumsum(saved), np.cumsum(gradients[::-1])[::-1]
    begins = batch * (outside + up_to + 2 * outputs) + from_here - gradients
    passed_on = np.where(several, 3 * inputs, inputs + outputs)
    ends = batch * (outside + up_to - saved + passed_on) + from_here
    return float(max(begins.max(), ends.max()))
