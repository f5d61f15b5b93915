"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's update, scaled for each layer in proportion to its weight norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from pydantic import field_validator

from shardscope.errors import unknown_name
from shardscope.spec.look import MethodStyle
from shardscope.spec.optimizer import (
    Fraction,
    NonNegative,
    NormSums,
    Off,
    Optimizer,
    OptimizerStates,
    Parameters,
    Positive,
)

PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "weight_decay": 0.01, "bias_correction": True, "clamp": "off", "max_grad_norm": "off", "decay_form": "inside",
        "adapt_undecayed": True,
    }
)  # fmt: skip
"""Options of Algorithm 2 in the ICLR paper."""
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": {},
        "v3": {"bias_correction": False},
        "apex": {"max_grad_norm": 1.0, "adapt_undecayed": False},
        "nvlamb": {"max_grad_norm": 1.0},
        "timm": {"max_grad_norm": 1.0, "adapt_undecayed": False},
        "pytorch-optimizer": {
            "bias_correction": False, "clamp": 10.0, "decay_form": "decoupled", "weight_decay": 0.0,
        },
    }
)  # fmt: skip
"""Options in which each published version of LAMB differs from the paper.

The variant `pytorch-optimizer` corresponds to the library of that name with ``adam_debias=True``. With
``adam_debias=False``, the library divides the learning rate by ``1 - beta1**step``, so the first steps differ.
"""


class Lamb(Optimizer):
    """LAMB in one of its published variants; the variant determines each option that is None."""

    name = "lamb"
    usual_rates = (1e-3, 1e-1)
    look = MethodStyle("#e0662a", "solid", "star")
    without_ratios = ("Adam", 1e-3)
    advice = MappingProxyType(
        {
            "clamp": "raise optimizer.clamp, or set it to 'off'",
            "trust_clip": "set trust_clip=False, or leave biases and norms out with exclude='1d'",
            "factor": "the frozen second moment no longer matches the gradients: increase compression.warmup_steps",
        }
    )

    lr: Positive = 2e-3
    """Learning rate before the schedule scales it, above 0."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay per step of the first and second moment, each 0 <= value < 1."""
    eps: NonNegative = 1e-6
    """Constant that is added to the square root of the second moment, at least 0."""
    weight_decay: NonNegative | None = None
    """Weight decay, at least 0, applied as determined by `decay_form`. The paper uses 0.01."""
    exclude: Literal["none", "1d"] = "none"
    """Tensors without weight decay or trust ratio: ``none``, or ``1d`` for biases and norms (at most one dimension)."""
    variant: str = "paper"
    """Published version, which determines the options that are None: ``paper`` (ICLR 2020, algorithm 2), ``v3`` (arXiv
    v3), ``apex``, ``nvlamb``, ``timm`` or ``pytorch-optimizer``. Each option can still be set separately."""
    bias_correction: bool | None = None
    """Divide the moments by ``1 - beta**step``."""
    clamp: Positive | Off | None = None
    """Upper bound of the weight norm in the trust ratio, above 0, or ``off``."""
    trust_clip: bool = False
    """Clip the trust ratio at 1 (LAMBC)."""
    max_grad_norm: Positive | Off | None = None
    """Clip all gradients to this global norm before they enter the moments, above 0, or ``off``."""
    decay_form: Literal["inside", "decoupled"] | None = None
    """Whether weight decay is part of the update that the trust ratio scales (``inside``), or is applied separately as
    in AdamW (``decoupled``)."""
    adapt_undecayed: bool | None = None
    """Use trust ratios for tensors without weight decay as well."""
    grad_averaging: bool = True
    """Weight the gradient by ``1 - beta1`` in the first moment; False gives it weight 1."""

    @field_validator("variant")
    @classmethod
    def _check_variant(cls, variant: str) -> str:
        if variant not in VARIANTS:
            raise unknown_name("optimizer.variant", variant, VARIANTS)
        return variant

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, with the variant's values, or else the paper's values, in place of None."""
        usual = {**PAPER, **VARIANTS[self.variant]}
        return {name: usual[name] if value is None else value for name, value in super().settings.items()}

    @property
    def states(self) -> OptimizerStates:
        return OptimizerStates(tensors=2, counter_bytes=4, buffers_updates=True)

    @property
    def carries(self) -> str:
        return "moments" if self.grad_averaging else "summed moments"

    def norm_sums(self, dimensions: Sequence[int]) -> NormSums:
        """Return the number of squared norms to sum: two per layer with a trust ratio, and one for clipping."""
        settings = self.settings
        adapts = settings["adapt_undecayed"] or settings["weight_decay"] > 0
        adapted = [d for d in dimensions if d > 1 or self.exclude == "none"] if adapts else []
        return NormSums(2 * len(adapted), int(settings["max_grad_norm"] != "off"))

    def buffered(self, dimensions: Sequence[int]) -> list[list[int]]:
        """Return the indices of all tensors, one list per batch; tensors excluded by `exclude` are a separate batch."""
        if self.exclude == "none":
            return super().buffered(dimensions)
        places = range(len(dimensions))
        return [[p for p in places if dimensions[p] > 1], [p for p in places if dimensions[p] <= 1]]

    def build(self, parameters: Parameters) -> Any:
        from shardscope.methods.optimizers.lamb._torch_build import build

        return build(self, parameters)
