"""Optimizers: which update rule, with which settings.

A setting left at None takes the default of the optimizer's name, or of LAMB's variant; `Optimizer.settings`
shows what that comes to. A setting that the chosen rule would ignore is refused, so a job never says more
than it does.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Choice

Off = Literal["off"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_SGD = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "exclude": "none"}
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "exclude": "none"}
_LAMB = {
    **_ADAMW,
    "lr": 2e-3,
    "eps": 1e-6,
    "variant": "paper",
    "bias_correction": True,
    "clamp": "off",
    "trust_clip": False,
    "max_grad_norm": "off",
    "decay_form": "inside",
    "adapt_undecayed": True,
    "grad_averaging": True,
}
_LARS = {
    "lr": 1.0,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "eps": 0.0,
    "trust_coefficient": 1e-3,
    "momentum_form": "classic",
    "norm_of": "parts",
    "nesterov": False,
    "trust_clip": False,
    "exclude": "none",
}

DEFAULTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {"sgd": _SGD, "nesterov": {**_SGD, "momentum": 0.9}, "adamw": _ADAMW, "lamb": _LAMB, "lars": _LARS}
)
"""The settings that have an effect on each optimizer, with their defaults."""

LAMB_VARIANTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "paper": {},
        "v3": {"bias_correction": False},
        "apex": {"max_grad_norm": 1.0, "adapt_undecayed": False},
        "nvlamb": {"max_grad_norm": 1.0},
        "timm": {"max_grad_norm": 1.0, "adapt_undecayed": False},
        "pytorch-optimizer": {
            "bias_correction": False,
            "clamp": 10.0,
            "decay_form": "decoupled",
            "weight_decay": 0.0,
        },
    }
)
"""What each published LAMB does differently from Algorithm 2 of the ICLR paper.

`pytorch-optimizer` is that library with ``adam_debias=True``; without it, the learning rate of its first steps is
divided by ``1 - beta1**step``.
"""


class Optimizer(Choice):
    """An update rule and its settings; None means the default of the name or of the variant.

    Example:
        >>> Optimizer("lamb", variant="apex").settings["max_grad_norm"]
        1.0
        >>> Optimizer("lamb", variant="apex", max_grad_norm="off").settings["max_grad_norm"]
        'off'
    """

    _field = "optimizer"
    _defaults = DEFAULTS

    name: str = "adamw"
    """``sgd``, ``nesterov`` (SGD with Nesterov's momentum), ``adamw``, ``lamb`` or ``lars``."""
    lr: Positive | None = None
    """Learning rate before the schedule, above 0. sgd and nesterov 0.1, adamw 1e-3, lamb 2e-3, lars 1.0."""
    momentum: Fraction | None = None
    """Decay of the velocity a step, 0 <= value < 1. sgd 0, nesterov and lars 0.9."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay a step of the first and second moment, each 0 <= value < 1. adamw and lamb (0.9, 0.999)."""
    eps: NonNegative | None = None
    """Added to the root of the second moment (adamw 1e-8, lamb 1e-6) or to the ratio's divisor (lars 0)."""
    weight_decay: NonNegative | None = None
    """Decay a step in units of the rate, at least 0. sgd, nesterov 0; adamw, lamb 0.01; lars 1e-4."""
    exclude: Literal["none", "1d"] | None = None
    """``1d``: biases and norms (at most one dimension) get neither decay nor a ratio. Default ``none``."""

    variant: str | None = None
    """LAMB as published: ``paper`` (ICLR 2020, Alg. 2), ``v3`` (arXiv v3), ``apex``, ``nvlamb``, ``timm``
    or ``pytorch-optimizer``. Sets the options below; each can still be given by itself."""
    bias_correction: bool | None = None
    """LAMB: divide the moments by ``1 - beta**step``."""
    clamp: Positive | Off | None = None
    """LAMB: the largest weight norm the ratio sees, above 0, or ``off``."""
    trust_clip: bool | None = None
    """LAMB: a ratio of at most 1 (LAMBC). LARS: the layer's own rate instead of lr, up to lr (LARC)."""
    max_grad_norm: Positive | Off | None = None
    """LAMB: scale all gradients down to this global norm before the moments see them, above 0, or ``off``."""
    decay_form: Literal["inside", "decoupled"] | None = None
    """LAMB: weight decay as part of the update that the ratio scales, or apart from it as in AdamW."""
    adapt_undecayed: bool | None = None
    """LAMB: give a trust ratio also to tensors without weight decay."""
    grad_averaging: bool | None = None
    """LAMB: the gradient enters the first moment with weight ``1 - beta1``; False gives it weight 1."""

    trust_coefficient: Positive | None = None
    """LARS: the share of its own norm that a layer moves at lr 1, above 0. Default 0.001."""
    momentum_form: Literal["classic", "torch", "post"] | None = None
    """LARS: learning rate and ratio both inside the velocity (``classic``, the paper), the ratio only
    (``torch``), or both applied after it, with the velocity's norm in the ratio (``post``)."""
    norm_of: Literal["sum", "parts"] | None = None
    """LARS: the ratio divides by ``|g + wd w|`` (``sum``) or by ``|g| + wd |w|`` (``parts``, the paper)."""
    nesterov: bool | None = None
    """LARS: look one step ahead along the velocity."""

    @field_validator("variant")
    @classmethod
    def _known_variant(cls, variant: str | None) -> str | None:
        if variant is not None and variant not in LAMB_VARIANTS:
            raise unknown_name("optimizer.variant", variant, LAMB_VARIANTS)
        return variant

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.name == "nesterov" and self.momentum == 0:
            raise SpecError(
                "optimizer.momentum=0 leaves nesterov nothing to look along; use sgd, or give it a momentum"
            )
        if self.name == "lars":
            self._check_lars()
        return self

    def _check_lars(self) -> None:
        settings = self.settings
        if settings["nesterov"] and settings["momentum"] == 0:
            raise SpecError(
                "optimizer.nesterov=True has no effect with momentum=0; leave it out, or give a momentum"
            )
        if settings["momentum_form"] == "post" and self.norm_of == "parts":
            raise SpecError(
                "optimizer.norm_of='parts' has no effect with momentum_form='post', which takes the norm "
                "of the velocity; leave it out"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that has an effect, as given, else the variant's, else the name's default."""
        preset = LAMB_VARIANTS[self.variant or "paper"] if self.name == "lamb" else {}
        return {**DEFAULTS[self.name], **preset, **self._given()}

    @property
    def carries(self) -> str:
        """What its state is, in a word or two: only an optimizer that carries the same can take it up.

        Example:
            >>> Optimizer("adamw").carries == Optimizer("lamb").carries
            True
        """
        settings = self.settings
        if self.name in ("adamw", "lamb"):
            return "moments" if settings.get("grad_averaging", True) else "summed moments"
        if not settings["momentum"]:
            return "nothing"
        form = settings.get("momentum_form", "post")
        inside = {"classic": " with rate and ratio inside", "torch": " with the ratio inside", "post": ""}
        return f"velocity{inside[form]}"

    @property
    def learning_rate(self) -> float:
        """The learning rate before the schedule: as given, or the default of the name."""
        return float(self.settings["lr"])
