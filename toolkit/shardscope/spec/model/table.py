"""Any model as a table of layers: each layer's parameters, FLOP, bytes saved for the backward pass, and output."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeFloat, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.model.base import Model
from shardscope.spec.model.step import StepTrace
from shardscope.spec.model.transformer import Transformer
from shardscope.spec.numbers import Total


class LayerRow(Spec):
    """One layer. Values that depend on the data are for one sample."""

    name: str
    num_params: Total
    """Number of trainable parameters; a tensor shared by several layers counts only for the first of them."""
    num_tensors: Total
    """Number of trainable parameter tensors."""
    flops: NonNegativeFloat
    """FLOP of the forward pass in matrix products and convolutions; a multiply-add counts as two."""
    saved_bytes: NonNegativeFloat
    """Bytes that the forward pass saves for the backward pass, not counting parameters and the model's inputs."""
    output_bytes: NonNegativeFloat
    """Bytes of the layer's output."""


class LayerTable(Model):
    """A model as a table of its layers in execution order, as created by `Model.from_module`."""

    kind: Literal["table"] = "table"
    layers: tuple[LayerRow, ...]
    step: StepTrace | None = None
    """Trace of the memory of a training step; None if it was not traced."""
    as_transformer: Transformer | None = None
    """The module as a transformer, if it was recognised as one by its matrix products and parameters; otherwise
    None."""
    notes: tuple[str, ...] = ()
    """Sentences on what the trace leaves out, such as operations without a FLOP formula."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.layers:
            raise SpecError("layers=() describes a model without layers; give at least one")
        return self

    @property
    def num_params(self) -> int:
        """Number of trainable parameters in all layers."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def num_tensors(self) -> int:
        """Number of trainable parameter tensors in all layers."""
        return sum(layer.num_tensors for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOP of one sample's forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def saved_bytes(self) -> float:
        """Bytes that one sample's forward pass saves for the backward pass."""
        return sum(layer.saved_bytes for layer in self.layers)
