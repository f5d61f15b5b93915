"""The moments of a training step at which most is alive, as columns: traced, or by rule from a table of layers.

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

from shardscope.errors import SpecError
from shardscope.spec.model.step import RECOMPUTE_MODES, Moment, Phase
from shardscope.spec.model.table import Layer, LayerTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SINGLE_OPERATION_TENSORS = 2
"""A weight and a bias; a layer with more parameter tensors is several operations."""
ELEMENT_BYTES = 4
"""Of a parameter, in float32."""


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
            f"recompute={recompute!r} is no way to recompute; use {', '.join(map(repr, RECOMPUTE_MODES))}"
        )
    if table.step is None:
        if recompute != "none":
            raise not_traced(f"recompute={recompute!r}")
        return _by_rule(table.layers)
    gradients = np.zeros(len(table.step.units))
    for row in table.step.parameters:
        gradients[row.unit] += element_bytes * row.num_elements * row.is_trained
    return _columns(table.step.moments[recompute], gradients)


def not_traced(field: str) -> SpecError:
    """The error where a table has no traced step and `field` needs one."""
    return SpecError(
        f"{field} needs a traced step, which this table lacks; describe the module with "
        "Model.from_module(module, example, memory=True)"
    )


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
