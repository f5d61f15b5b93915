"""A model whose experts are distributed over the ranks of an expert axis; each rank has all other layers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from shardscope.errors import SpecError
from shardscope.training.expert_axis import ExpertAxis
from shardscope.training.models.mixture import experts_of
from shardscope.training.tensor.split import Cut, TensorSplit


class ExpertSplit(TensorSplit):
    """Divides the experts of every layer over ranks that each train on their own samples.

    A weight of all experts of a layer is divided along its first dimension, so norms, checkpoints and whole tensors are
    those of any divided parameter.

    Args:
        axis: The ranks over which the experts are distributed.
    """

    shares_batch: ClassVar[bool] = False

    def __init__(self, axis: ExpertAxis) -> None:
        super().__init__(axis)
        self.expert_axis = axis

    def divide(self, model: nn.Module) -> nn.Module:
        """Keep this rank's experts in each layer of `model`, in place, and return it.

        Raises:
            SpecError: The model has no layer with experts.
        """
        layers = dict(experts_of(model))
        if not layers:
            raise SpecError(
                f"expert={self.axis.size} distributes experts, but the model of type {type(model).__name__} has none; "
                "use a model with experts of the catalogue, such as 'moe-nano', or expert=1"
            )
        for layer_name, layer in layers.items():
            layer.axis = self.expert_axis
            for own, parameter in layer.of_each():
                name = f"{layer_name}.{own}"
                self.cuts[name] = Cut(0)
                parameter.data = self.own(name, parameter.data).clone()
        return model
