"""The result of a step on one rank, as its event in the run log has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardscope.training.gradient_noise import NoiseSample


@dataclass(frozen=True)
class StepResult:
    """Result of one step on this rank.

    Attributes:
        loss: Mean loss over this rank's samples, weighted by how many targets count in them, so that the mean over
            ranks is the mean over all targets; None on a rank that computes no loss, such as a parameter server or a
            pipeline stage other than the last.
        grad_norm: Norm of the gradient before clipping; None if it was not computed.
        skipped: Whether the update was skipped because fp16 gradients overflowed.
        dropped: Whether the gradient was not used, or not computed, because other ranks were faster (backup workers).
        noise: Measurement of the gradient noise scale; None if it was not measured in this step.
    """

    loss: float | None
    grad_norm: float | None
    skipped: bool = False
    dropped: bool = False
    noise: NoiseSample | None = None

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> StepResult:
        """Combine the results of a rank's gradients in one step: several only if ranks share parts of a batch."""
        if len(results) == 1:
            return results[0]
        losses = [each.loss for each in results if each.loss is not None]
        norms = [each.grad_norm for each in results if each.grad_norm is not None]
        return cls(
            sum(losses) / len(losses) if losses else None, max(norms, default=None),
            skipped=any(each.skipped for each in results),
        )  # fmt: skip

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the step's event, without those that do not apply."""
        fields: dict[str, Any] = {"grad_norm": self.grad_norm, "skipped": self.skipped}
        if self.dropped:
            fields["dropped"] = True
        if self.noise is not None:
            fields["noise"] = self.noise.as_event()
        return fields
