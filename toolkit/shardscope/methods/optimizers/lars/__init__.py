"""LARS (You et al. 2017, arXiv:1708.03888): momentum SGD with a learning rate for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import model_validator

from shardscope.errors import SpecError
from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import (
    Fraction,
    NonNegative,
    NormSums,
    Optimizer,
    OptimizerStates,
    Parameters,
    Positive,
)


class Lars(Optimizer):
    """Momentum SGD that scales each layer's step in proportion to the layer's norm."""

    name = "lars"
    usual_rates = (0.3, 30.0)
    scaling = "linear"
    look = MethodStyle("#c49a0c", "dashdot", "triangle-up")
    without_ratios = ("SGD", 0.1)
    advice = MappingProxyType(
        {
            "trust_clip": "there it takes plain SGD steps: raise the learning rate, lower trust_coefficient, or set "
            "trust_clip=False"
        }
    )

    lr: Positive = 1.0
    """Learning rate before the schedule, above 0."""
    momentum: Fraction = 0.9
    """Decay of the velocity per step, 0 <= value < 1."""
    weight_decay: NonNegative = 1e-4
    """Weight decay per step in units of the learning rate, at least 0."""
    eps: NonNegative = 0.0
    """Added to the ratio's divisor, at least 0."""
    exclude: Literal["none", "1d"] = "none"
    """``1d``: biases and norms (at most one dimension) get neither weight decay nor a trust ratio."""
    trust_coefficient: Positive = 1e-3
    """Size of a layer's step at lr 1, relative to the layer's norm, above 0."""
    momentum_form: Literal["classic", "torch", "post"] = "classic"
    """Learning rate and ratio both inside the velocity (``classic``, the paper), the ratio only (``torch``), or both
    applied after it, with the velocity's norm in the ratio (``post``)."""
    norm_of: Literal["sum", "parts"] | None = None
    """The ratio divides by ``|g + wd w|`` (``sum``) or by ``|g| + wd |w|`` (``parts``, the paper and the default)."""
    nesterov: bool = False
    """Look one step ahead along the velocity."""
    trust_clip: bool = False
    """Use the layer's own rate instead of lr, with lr as its upper bound (LARC)."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise SpecError(
                "optimizer.nesterov=True has no effect with momentum=0; leave it out, or give a momentum"
            )
        if self.momentum_form == "post" and self.norm_of == "parts":
            raise SpecError(
                "optimizer.norm_of='parts' has no effect with momentum_form='post', which takes the norm "
                "of the velocity; leave it out"
            )
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by name, as given or by default."""
        return {**super().settings, "norm_of": self.norm_of or "parts"}

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(tensors=int(self.momentum > 0), buffers_updates=True)

    @property
    def carries(self) -> str:
        inside = {"classic": " with rate and ratio inside", "torch": " with the ratio inside", "post": ""}
        return f"velocity{inside[self.momentum_form]}" if self.momentum else "nothing"

    def norm_sums(self, dimensions: Sequence[int]) -> NormSums:
        """Squared norms to sum: of each adapted layer's weights, and of the tensor in its ratio's denominator."""
        return NormSums(2 * sum(d > 1 or self.exclude == "none" for d in dimensions))

    def buffered(self, dimensions: Sequence[int]) -> list[list[int]]:
        """Indices of tensors whose gradients are buffered with weight decay added; none without decay."""
        if not self.weight_decay:
            return []
        return [[place for place, d in enumerate(dimensions) if d > 1 or self.exclude == "none"]]

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.lars._torch import TorchLars

        settings = self.settings
        groups = parameters.groups(settings.pop("exclude"), weight_decay=0.0, adapt=False)
        return TorchLars(groups, **settings, reduce_squares=parameters.reduce_squares)
