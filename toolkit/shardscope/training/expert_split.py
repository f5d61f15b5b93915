"""A model whose experts are distributed over the ranks of an expert axis, and divided over those of a tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from shardscope.errors import SpecError
from shardscope.spec.divisors import divisors_text
from shardscope.training._compat import leave_out_of_ddp
from shardscope.training.expert_axis import ExpertAxis
from shardscope.training.models.mixture import Experts, experts_of
from shardscope.training.tensor.split import Cut, TensorSplit


class ExpertSplit(TensorSplit):
    """Divides the experts of every layer over ranks that each train on their own samples.

    A weight of all experts of a layer is divided along its first dimension, so norms, checkpoints and whole tensors are
    those of any divided parameter.

    Args:
        axis: The ranks over which the experts are distributed.
    """

    def __init__(self, axis: ExpertAxis) -> None:
        super().__init__(axis)
        self.expert_axis = axis

    def divide(self, model: nn.Module) -> nn.Module:
        """Keep this rank's experts in each layer of `model`, in place, and return it.

        Raises:
            SpecError: The model has no layer with experts.
        """
        for layer_name, layer in _layers(model, f"expert={self.axis.size} distributes experts", "expert=1"):
            layer.axis = self.expert_axis
            for own, parameter in layer.of_each():
                name = f"{layer_name}.{own}"
                self.cuts[name] = Cut(0)
                parameter.data = self.own(name, parameter.data).clone()
        return model

    def set_apart(self, model: nn.Module) -> tuple[list[nn.Module], list[tuple[str, nn.Parameter]]]:
        """Return the modules and named parameters of this rank's experts, which `DistributedDataParallel` then ignores.

        Another strategy averages their gradients, over the ranks that hold the same experts.
        """
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if name in self.cuts and not parameter.is_meta  # of another stage of a pipeline
        ]
        leave_out_of_ddp(model, [name for name, _ in named])
        return [*dict.fromkeys(model.get_submodule(name.rpartition(".")[0]) for name, _ in named)], named

    def average_(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make gradients that are means over the ranks that hold the same experts means over all data ranks.

        An expert has a sum over the ranks that sent it tokens.
        """
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= self.axis.size


class ExpertTensorSplit(TensorSplit):
    """Divides a model over a tensor group, with each routed expert along its inner width.

    As other feed-forward parts, the first layer of each expert is divided by columns and the second one by rows
    (Shoeybi et al., arXiv 1909.08053, section 3; Singh et al., arXiv 2303.06318, section 3). Every rank routes and
    exchanges all tokens of its group.
    """

    def divide(self, model: nn.Module) -> nn.Module:
        """Divide the planned layers of `model` and its experts, in place, and return it.

        Raises:
            SpecError: As of `TensorSplit.divide`; or the inner width of the experts cannot be divided.
        """
        super().divide(model)
        for layer_name, layer in _layers(model, f"tensor={self.axis.size} divides experts", "expert=1"):
            width = layer.widen.weight.shape[1]
            if width % self.axis.size:
                raise SpecError(
                    f"tensor={self.axis.size} does not divide the inner width {width} of the experts of layer "
                    f"{layer_name!r}; use one of {divisors_text(width, near=self.axis.size)}"
                )
            layer.tensor_axis = self.axis
            layer.narrow.project.adds_bias = not self.axis.rank
            for own, dim in (("widen.weight", 1), ("widen.bias", 1), ("narrow.project.weight", 2)):
                name = f"{layer_name}.{own}"
                self.cuts[name] = Cut(dim)
                parameter = layer.get_parameter(own)
                parameter.data = self.own(name, parameter.data).clone()
        return model


def _layers(model: nn.Module, what: str, instead: str) -> Iterator[tuple[str, Experts]]:
    """Yield the layers with experts, by name; refuse a model that has none."""
    layers = [*experts_of(model)]
    if not layers:
        raise SpecError(
            f"{what}, but the model of type {type(model).__name__} has none; use a model with experts of the "
            f"catalogue, such as 'moe-nano', or {instead}"
        )
    yield from layers
