"""The link below which compression makes whole steps faster, and how certain that is, from predictions and a few runs.

The limit is the bandwidth below which a step is faster by a margin with some method whose loss stays within its
tolerance. If measured speed-ups differ from predicted ones by more than the margin, the limit becomes a range: it lies
where the predicted speed-up, enlarged or reduced by the largest error, equals the margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from shardscope.errors import SpecError
from shardscope.measure.compression_speedup import MARGIN, PredictedStep, Worth
from shardscope.spec.units import bit_rate_text


class Limit(NamedTuple):
    """Below which bandwidth to compress, and how far predictions were off."""

    link: str
    """Bandwidth of the link of the runs, such as ``100 Mbit/s``."""
    method: str
    """Label of the method that pays off up to the highest bandwidth."""
    fastest: str
    """Label of the fastest method on the link of the runs; like `method`, its loss stays within its tolerance."""
    bandwidth: float
    """The limit in bytes per second, as predicted; infinite if compression pays off on any link, 0 if on none."""
    low: float
    """The lower end of the range, in bytes per second; equal to `bandwidth` if predictions are accurate enough."""
    high: float
    """The upper end of the range, in bytes per second; infinite if the errors allow any link."""
    predicted: float
    """Predicted speed-up of a whole step with `fastest` on the link of the runs."""
    measured: float
    """The same, as measured."""
    errors: tuple[float, float]
    """Smallest and largest relative difference of a measured speed-up from the predicted one."""

    @property
    def is_range(self) -> bool:
        """Whether predictions were off by more than the margin, so that the limit is a range."""
        return self.errors[1] > MARGIN - 1

    @property
    def sentence(self) -> str:
        """The answer, in one sentence of Markdown."""
        gain = (
            f"{self.measured:.2f} times faster at {self.link}, {self.predicted:.2f} predicted; "
            f"predicted speed-ups were off by {self.errors[0]:.0%} to {self.errors[1]:.0%}"
        )
        least = f"{MARGIN - 1:.0%}"
        if self.is_range:
            gain += f", more than {least}, so a range replaces the predicted {bit_rate_text(self.bandwidth)}"
        none = f"no compressor whose loss stays within its tolerance gains {least}"
        if not self.high:
            return f"**On no link does compression pay off:** {none} ({self.fastest}: {gain})."
        method = (
            self.method if self.method == self.fastest else f"{self.method}, or at {self.link} {self.fastest}"
        )
        if math.isinf(self.low):
            return f"**On any link use {method}** ({gain})."
        if math.isinf(self.high):
            unsure = f"predictions cannot tell whether {method} gains {least}"
            if not self.low:
                return f"**On any link, {unsure}** ({gain})."
            return f"**Below {bit_rate_text(self.low)} use {method}** ({gain}); above it {unsure}."
        ends = dict.fromkeys(bit_rate_text(end) for end in (self.low, self.high) if end)
        return f"**Below {'' if self.low else 'at most '}{' to '.join(ends)} use {method}** ({gain}); above it {none}."


def compression_limit(whole: Worth, measured: Mapping[str, float]) -> Limit:
    """Return the bandwidth below which to compress, and how far predictions were off.

    Args:
        whole: The predicted steps on a link; methods whose loss is not within its tolerance are not recommended.
        measured: Measured step times in seconds on the same link, by the method's label: of ``none``, of the
            recommended method, and of any others.

    Raises:
        SpecError: A needed step time is missing, or no method's loss stays within its tolerance.
    """
    packed = [step for step in whole.harmless if step.compression.is_on]
    if not packed:
        raise SpecError(
            "methods contains no method whose loss stays within its tolerance; add for example 'int8' to "
            "compression_speedup's methods"
        )
    chosen = _chosen(whole, packed)  # refuses the machine's own link
    assert whole.emulated is not None
    fastest = min(packed, key=lambda step: step.step_s)
    for label in ("none", fastest.compression.label):
        if label not in measured:
            raise SpecError(f"measured lacks {label!r}, which the limit depends on; run it on {whole.link}")
    by_label = {step.compression.label: step for step in whole.steps}
    speedups = {
        name: measured["none"] / measured[name] for name in measured if by_label[name].compression.is_on
    }
    errors = [abs(speed / whole.speedup(by_label[name]) - 1) for name, speed in speedups.items()]
    limit, least, most = whole.pays_below(chosen), min(errors), max(errors)
    low = high = limit
    if most > MARGIN - 1:
        low = max(whole.pays_below(step, margin=MARGIN * (1 + most)) for step in packed)
        high = max(whole.pays_below(step, margin=MARGIN / (1 + most)) for step in packed)
    return Limit(
        bit_rate_text(whole.emulated.bandwidth), chosen.compression.label, fastest.compression.label, limit, low, high,
        whole.speedup(fastest), speedups[fastest.compression.label], (least, most),
    )  # fmt: skip


def _chosen(whole: Worth, packed: list[PredictedStep]) -> PredictedStep:
    """Return the step that pays off up to the highest bandwidth; of several, the fastest on the link."""
    return max(packed, key=lambda step: (whole.pays_below(step), -step.step_s))
