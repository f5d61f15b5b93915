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
    """Momentum SGD that scales each layer's step in proportion to the layer's weight norm."""

    name = "lars"
    usual_rates = (0.3, 30.0)
    scaling = "linear"
    look = MethodStyle("#c49a0c", "dashdot", "triangle-up")
    without_ratios = ("SGD", 0.1)
    advice = MappingProxyType(
        {
            "trust_clip": "these layers take plain SGD steps: raise the learning rate, lower trust_coefficient, or set "
            "trust_clip=False"
        }
    )

    lr: Positive = 1.0
    """Learning rate before the schedule scales it, above 0."""
    momentum: Fraction = 0.9
    """Momentum: decay of the velocity per step, 0 <= value < 1."""
    weight_decay: NonNegative = 1e-4
    """Weight decay, at least 0: this multiple of the weights is added to the gradient, and scaled with it."""
    eps: NonNegative = 0.0
    """Constant that is added to the denominator of the trust ratio, at least 0."""
    exclude: Literal["none", "1d"] = "none"
    """Tensors without weight decay or trust ratio: ``none``, or ``1d`` for biases and norms (at most one dimension)."""
    trust_coefficient: Positive = 1e-3
    """Size of a layer's step at a learning rate of 1, relative to the layer's weight norm, above 0."""
    momentum_form: Literal["classic", "torch", "post"] = "classic"
    """Factors that the velocity includes: learning rate and trust ratio (``classic``, as in the paper), only the ratio
    (``torch``), or neither (``post``). With ``post``, the step is the velocity times both factors, and the ratio is
    computed from the norm of the velocity."""
    norm_of: Literal["sum", "parts"] | None = None
    """Denominator of the trust ratio: ``|g + wd w|`` (``sum``), or ``|g| + wd |w|`` (``parts``, as in the paper; the
    default), for gradient g, weights w and weight decay wd."""
    nesterov: bool = False
    """Use Nesterov momentum, which looks one step ahead along the velocity."""
    trust_clip: bool = False
    """LARC: use each layer's own learning rate, capped at `lr`, instead of multiplying it by `lr`."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise SpecError(
                "optimizer.nesterov=True has no effect with momentum=0; leave it out, or set a momentum above 0"
            )
        if self.momentum_form == "post" and self.norm_of == "parts":
            raise SpecError(
                "optimizer.norm_of='parts' has no effect with momentum_form='post', which uses the norm "
                "of the velocity; leave it out"
            )
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, with defaults filled in."""
        return {**super().settings, "norm_of": self.norm_of or "parts"}

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(tensors=int(self.momentum > 0), buffers_updates=True)

    @property
    def carries(self) -> str:
        inside = {"classic": " with rate and ratio inside", "torch": " with the ratio inside", "post": ""}
        return f"velocity{inside[self.momentum_form]}" if self.momentum else "nothing"

    def norm_sums(self, dimensions: Sequence[int]) -> NormSums:
        """Return the number of squared norms to sum: two per layer with a trust ratio (numerator and denominator)."""
        return NormSums(2 * sum(d > 1 or self.exclude == "none" for d in dimensions))

    def buffered(self, dimensions: Sequence[int]) -> list[list[int]]:
        """Return the indices of tensors whose gradients are copied to add weight decay; none without weight decay."""
        if not self.weight_decay:
            return []
        return [[place for place, d in enumerate(dimensions) if d > 1 or self.exclude == "none"]]

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.lars._torch import TorchLars

        settings = self.settings
        groups = parameters.groups(settings.pop("exclude"), weight_decay=0.0, adapt=False)
        return TorchLars(groups, **settings, reduce_squares=parameters.reduce_squares)
