"""Any model as the table of its layers: what each holds, computes, saves for the backward pass and hands on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeFloat, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.model.base import Model
from shardscope.spec.model.step import StepTrace
from shardscope.spec.numbers import Total


class Layer(Spec):
    """One layer. What depends on the data is for one sample."""

    name: str
    num_params: Total
    """Trainable; a tensor that several layers share counts for the first one."""
    num_tensors: Total
    """Trainable parameter tensors."""
    flops: NonNegativeFloat
    """FLOP of the forward pass in matrix products and convolutions; a multiplication and its addition are two."""
    saved_bytes: NonNegativeFloat
    """What the forward pass keeps for the backward pass, parameters and the model's inputs left out."""
    output_bytes: NonNegativeFloat
    """What the layer hands to the next one."""


class LayerTable(Model):
    """A model by its layers, in the order in which they run. `Model.from_module` makes one."""

    kind: Literal["table"] = "table"
    layers: tuple[Layer, ...]
    step: StepTrace | None = None
    """What is alive in a training step; None where none was traced."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.layers:
            raise SpecError("layers=() describes a model of no layers; give at least one")
        return self

    @property
    def num_params(self) -> int:
        """Trainable parameters of all layers."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        """Trainable parameter tensors of all layers."""
        return sum(layer.num_tensors for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOP of one sample's forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def saved_bytes(self) -> float:
        """Bytes that one sample's forward pass keeps for the backward pass."""
        return sum(layer.saved_bytes for layer in self.layers)
