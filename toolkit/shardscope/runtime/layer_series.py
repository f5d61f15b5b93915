"""Series over the steps of a run at which its layers were looked at: a layer's trust ratio, and what is owed of it."""

from __future__ import annotations

from dataclasses import dataclass

Values = tuple[float, ...]
Known = tuple[float | None, ...]


@dataclass(frozen=True)
class RatioSeries:
    """One layer under a layer-wise optimizer, step by step.

    Attributes:
        layer: Name of the parameter.
        steps: Those that were looked at.
        lr: The learning rate.
        ratio: The trust ratio; None where the layer is not adapted.
        weight_norm: Of the weights before the step; None where the optimizer needed none.
        update_norm: What the ratio divides by: LAMB's update, LARS's gradient with its decay.
        bound: The setting that held the ratio down, ``clamp``, ``trust_clip`` or ``factor``; None where none did.
    """

    layer: str
    steps: tuple[int, ...]
    lr: Values
    ratio: Known
    weight_norm: Known
    update_norm: Known
    bound: tuple[str | None, ...]

    @property
    def is_adapted(self) -> bool:
        """Whether it has a ratio at all."""
        return any(value is not None for value in self.ratio)


@dataclass(frozen=True)
class OwedSeries:
    """What compression owes of one tensor or unit of sharding, step by step.

    Attributes:
        layer: Its name.
        kind: ``residual`` of ranks' own gradients, ``share`` of the mean, ``unsent`` under deep gradient compression.
        steps: Those that were looked at.
        owed: Norm of what was still to be sent after the step.
        gradient: Norm of what the step had brought, in the same units.
    """

    layer: str
    kind: str
    steps: tuple[int, ...]
    owed: Values
    gradient: Values

    @property
    def relative(self) -> Known:
        """What is owed, in gradients of one step; None where there was no gradient."""
        pairs = zip(self.owed, self.gradient, strict=True)
        return tuple(owed / gradient if gradient else None for owed, gradient in pairs)
