"""Step time against bandwidth, with and without compression: one line per method, and the points where lines
cross.

A step takes ``rest + sent bytes / rate``, where the rest contains computing, packing and latencies. The line
of a method crosses the line of the uncompressed step at one bandwidth at most, given by equation 1 of Agarwal
et al. 2022, "On the utility of gradient compression in distributed training systems": the method pays off
below it or, if it saves messages instead of bytes, above it. Figures, panels and sentences all take this
threshold from `Worth`. It imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from shardscope.measure.compression.arguments import bandwidth_of
from shardscope.measure.compression.loss_increase import (
    MEASURED_ON,
    change_text,
    diverges,
    is_within_tolerance,
    loss_increase,
    loss_text,
)
from shardscope.show import Part, Sentences, Shown, Table
from shardscope.spec import Compression, Link
from shardscope.spec.units import bit_rate_text, duration_text, faster_text, listed

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 1.15
"""Smallest predicted speed-up that exceeds the error of predictions."""
ERROR = f"the prediction error ({MARGIN - 1:.0%})"


@dataclass(frozen=True)
class PredictedStep:
    """Predicted step time with one method, in seconds.

    Attributes:
        compression: The method.
        sent_bytes: Bytes sent by the rank that sends most.
        compute_s: Time of everything except packing and communication.
        codec_s: Time for packing and unpacking.
        communication_s: Time of all messages.
    """

    compression: Compression
    sent_bytes: float
    compute_s: float
    codec_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """Time of the whole step, in seconds."""
        return self.compute_s + self.codec_s + self.communication_s


class MeasuredStep(NamedTuple):
    """Measured step time of a run of the same job.

    Attributes:
        compression: The method.
        bandwidth: Bandwidth of the run's link, in bytes per second.
        step_s: Median step time, in seconds.
        run_id: Id of the run.
    """

    compression: Compression
    bandwidth: float
    step_s: float
    run_id: str = ""


class Threshold(NamedTuple):
    """Bandwidths up to which compression pays off, in bytes per second, among methods within their tolerance.

    Attributes:
        step: The step with the method that pays off up to the highest bandwidth.
        below: Bandwidth below which this step gains more than the prediction error, so that compression pays
            off. Infinite if it does on every link, 0 if on none.
        crossing: Bandwidth up to which any method gains, where its line crosses the uncompressed line. From
            `below` to `crossing`, the gain is smaller than the prediction error. Infinite if a method gains
            on every link.
    """

    step: PredictedStep
    below: float
    crossing: float


@dataclass(frozen=True, repr=False)
class Worth(Shown):
    """Predicted step times of all methods, as functions of the bandwidth of a link.

    Attributes:
        link: The link for which `steps` are predicted.
        steps: One entry per method, the uncompressed step first.
        optimizer: Name of the job's optimizer.
        own_rate: Bytes per second that a rank can send without an emulated link, an upper bound for every link.
        efficiency: Share of a link's bandwidth that messages reach.
        is_own: Whether `link` is the machine's own link.
        of: What is predicted, such as ``gpt-nano, ring of 2 ranks``.
        measured: Measured steps of the same job, on links with the same latency.
    """

    link: Link
    steps: tuple[PredictedStep, ...]
    optimizer: str = "adamw"
    own_rate: float = inf
    efficiency: float = 1.0
    is_own: bool = False
    of: str = ""
    measured: tuple[MeasuredStep, ...] = ()

    @property
    def plain(self) -> PredictedStep:
        """The uncompressed step."""
        return self.steps[0]

    @property
    def best(self) -> PredictedStep:
        """The fastest step."""
        return min(self.steps, key=lambda step: step.step_s)

    @property
    def harmless(self) -> tuple[PredictedStep, ...]:
        """The uncompressed step, and the steps of methods whose measured loss increase is within their tolerance."""
        return tuple(step for step in self.steps if self.is_harmless(step))

    def is_harmless(self, step: PredictedStep) -> bool:
        """Return whether the loss increase of a step's method was measured and is within its tolerance."""
        return is_within_tolerance(step.compression, self.optimizer)

    @property
    def recommended(self) -> PredictedStep:
        """The fastest step whose method's loss increase is within its tolerance."""
        return min(self.harmless, key=lambda step: step.step_s)

    def step_with(self, compression: Compression) -> PredictedStep | None:
        """Return the step with a method; None if it is not predicted."""
        return next((step for step in self.steps if step.compression == compression), None)

    def speedup(self, step: PredictedStep) -> float:
        """Return how many times faster a step is than the uncompressed step."""
        return self.plain.step_s / step.step_s

    def at(self, bandwidth: float | str) -> Worth:
        """Return the prediction for a link with another bandwidth and the same latency; nothing is measured again.

        Args:
            bandwidth: In bytes per second or as text with a unit, such as ``"1 Gbit/s"``.

        Raises:
            SpecError: The bandwidth is not valid.
        """
        link = Link(bandwidth=bandwidth_of(bandwidth), latency_s=self.link.latency_s)
        longer = 1 / self._rate(link.bandwidth) - 1 / self._rate(self.link.bandwidth)
        steps = (
            replace(step, communication_s=step.communication_s + step.sent_bytes * longer)
            for step in self.steps
        )
        return replace(self, link=link, steps=tuple(steps), is_own=False)

    def pays_below(self, step: PredictedStep, *, margin: float = MARGIN) -> float:
        """Return the bandwidth, in bytes per second, below which a step is `margin` times faster than uncompressed.

        It is 0 if the step is that much faster on no link, or only above some bandwidth (see `pays_above`), and
        infinite if it is that much faster on every link.

        Args:
            step: One of `steps`.
            margin: The speed-up that counts as a gain; 1 for the bandwidth at which both steps take equally
                long.
        """
        saved, extra_s = self._saved(step, margin)
        if saved < 0 or (saved == 0 and extra_s >= 0):
            return 0.0
        return self._level(saved / extra_s if extra_s > 0 else inf)

    def pays_above(self, step: PredictedStep, *, margin: float = MARGIN) -> float:
        """Return the bandwidth above which a step that sends more bytes in fewer messages is `margin` times faster.

        It is infinite if there is none; see `pays_below` for steps that send fewer bytes.
        """
        saved, extra_s = self._saved(step, margin)
        return self._level(saved / extra_s if saved < 0 and extra_s < 0 else inf)

    def _saved(self, step: PredictedStep, margin: float) -> tuple[float, float]:
        """Return the bytes that a step saves, and the seconds that it adds, not counting the transfer of its bytes."""
        rate = self._rate(self.link.bandwidth)
        rest, plain_rest = (one.step_s - one.sent_bytes / rate for one in (step, self.plain))
        return self.plain.sent_bytes - margin * step.sent_bytes, margin * rest - plain_rest

    def _level(self, rate: float) -> float:
        return inf if rate >= self.own_rate else rate / self.efficiency

    def _rate(self, bandwidth: float) -> float:
        return min(self.efficiency * bandwidth, self.own_rate)

    def crossing(self, step: PredictedStep) -> float:
        """Return the bandwidth at which a step takes as long as the uncompressed step, as `pays_below` does."""
        return self.pays_below(step, margin=1.0)

    @property
    def threshold(self) -> Threshold | None:
        """Bandwidth below which compression pays off; None if no method within its tolerance gains on any link."""
        packed = [step for step in self.harmless if step.compression.is_on and self.crossing(step)]
        if not packed:
            return None
        chosen = max(packed, key=lambda step: (self.pays_below(step), self.crossing(step), -step.step_s))
        return Threshold(chosen, self.pays_below(chosen), max(map(self.crossing, packed)))

    @property
    def pays(self) -> bool:
        """Whether the recommended step is faster than the uncompressed step by more than the error of predictions."""
        return self.speedup(self.recommended) >= MARGIN

    @property
    def limit(self) -> str:
        """Sentences on the bandwidth below which compression pays off, with a method within its tolerance."""
        found = self.threshold
        packed = [step for step in self.harmless if step.compression.is_on]
        above = min(packed, key=self.pays_above, default=self.plain)
        level = self.pays_above(above)
        if level < inf and not (found and found.below == inf):
            where = f"above {bit_rate_text(level)} ({above.compression.label})"
            if found and found.below:
                where = f"below {bit_rate_text(found.below)} ({found.step.compression.label}) and {where}"
            return f"Compression pays off {where}."
        if found is None:
            return "On no link does compression pay off with a method whose loss stays within its tolerance."
        name, is_always = found.step.compression.label, found.crossing == inf
        if found.below == inf:
            return f"Compression pays off on any link ({name})."
        if not found.below:
            where = "" if is_always else f", on links below {bit_rate_text(found.crossing)}"
            return f"Any gain from compression ({name}{where}) is below {ERROR}."
        first = f"Compression pays off below {bit_rate_text(found.below)} ({name})."
        if is_always:
            return f"{first} Above, any gain is below {ERROR}."
        return f"{first} Between {_between(found.below, found.crossing)}, any gain is below {ERROR}."

    @property
    def verdict(self) -> str:
        """Sentences on the step on the link: the fastest method within its tolerance, and what others would gain."""
        chosen, best = self.recommended, self.best
        if chosen.compression.is_on:
            gain = faster_text(self.speedup(chosen))
            within = "" if self.pays else f", which is below {ERROR}"
            told = (
                f"On {self.where}, a step takes {duration_text(chosen.step_s)} with {chosen.compression.label} instead "
                f"of {duration_text(self.plain.step_s)}: {gain}{within}; {self._its_loss(chosen)}."
            )
        else:
            told = f"On {self.where}, the uncompressed step of {duration_text(self.plain.step_s)} is the fastest."
            packed = [step for step in self.harmless if step.compression.is_on]
            if packed:
                next_best = min(packed, key=lambda step: step.step_s)
                told += f" {next_best.compression.label} would be {faster_text(self.speedup(next_best))}."
        if best is not chosen:
            gain = faster_text(self.speedup(best))
            told += f" {best.compression.label} would be {gain}, but {self._its_loss(best)}."
        return told

    @property
    def found(self) -> str:
        """Sentences on measured steps, one for each link: with the methods, and without compression."""
        links = dict.fromkeys(step.bandwidth for step in self.measured if step.compression.is_on)
        return " ".join(map(self._measured_text, links))

    def _measured_text(self, bandwidth: float) -> str:
        on_link = [step for step in self.measured if step.bandwidth == bandwidth]
        predicted = {step.compression.label: step.step_s for step in self.at(bandwidth).steps}
        told = []
        for step in sorted(on_link, key=lambda step: step.step_s):
            name, plain = step.compression.label, self.measured_plain(step)
            about = [faster_text(plain.step_s / step.step_s)] if plain and step.compression.is_on else []
            about += [f"predicted: {duration_text(predicted[name])}"] if name in predicted else []
            kind = f"with {name}" if step.compression.is_on else "uncompressed"
            more = f" ({'; '.join(about)})" if about else ""
            told.append(f"{duration_text(step.step_s)} {kind}{more}")
        return f"Measured on {bit_rate_text(bandwidth)}: {listed(told)}."

    def measured_plain(self, step: MeasuredStep) -> MeasuredStep | None:
        """Return the measured uncompressed step on the same link; None if there is none."""
        plain = (one for one in self.measured if not one.compression.is_on)
        return next((one for one in plain if one.bandwidth == step.bandwidth), None)

    @property
    def where(self) -> str:
        """The link as text: ``a link of 100 Mbit/s, 1 ms``."""
        if self.is_own:
            return f"the machine's own link ({bit_rate_text(self.link.bandwidth)})"
        return f"a link of {bit_rate_text(self.link.bandwidth)}, {duration_text(self.link.latency_s)}"

    def _its_loss(self, step: PredictedStep) -> str:
        told = change_text(step.compression, self.optimizer, with_tolerance=True)
        return f"it {told}" if diverges(step.compression, self.optimizer) else f"its loss is {told}"

    def loss_of(self, step: PredictedStep) -> str:
        """Return the effect of a step's method on the loss, with its tolerance, as text."""
        return loss_text(step.compression, self.optimizer, with_tolerance=True)

    @property
    def losses(self) -> pd.DataFrame:
        """Measured loss increase of each method with each optimizer, in percent; see `loss_increase`."""
        return loss_increase()

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with one row per method, fastest first.

        Columns: method, step_s, compute_s, codec_s, communication_s, sent_bytes, speed (the speed-up over the
        uncompressed step), pays_below_bit_per_s and pays_above_bit_per_s (see `pays_below` and `pays_above`), loss
        (the method's effect on it, as text), and is_harmless (whether that is within the method's tolerance).
        """
        import pandas as pd

        rows = [
            {
                "method": step.compression.label, "step_s": step.step_s, "compute_s": step.compute_s,
                "codec_s": step.codec_s, "communication_s": step.communication_s,
                "sent_bytes": step.sent_bytes, "speed": self.speedup(step),
                "pays_below_bit_per_s": 8 * self.pays_below(step),
                "pays_above_bit_per_s": 8 * self.pays_above(step), "loss": self.loss_of(step),
                "is_harmless": self.is_harmless(step),
            }
            for step in self._sorted()
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def _sorted(self) -> list[PredictedStep]:
        return sorted(self.steps, key=lambda step: step.step_s)

    @property
    def sentences(self) -> list[str]:
        """The sentences on the prediction, starting with the limit."""
        return [*filter(None, [self.limit, self.verdict, self.found, f"Losses: {MEASURED_ON}."])]

    def _shown(self) -> list[Part]:
        rows = [
            [
                step.compression.label,
                duration_text(step.step_s),
                faster_text(self.speedup(step)) if step.compression.is_on else "",
                below_text(self.pays_below(step), self.pays_above(step)) if step.compression.is_on else "",
                change_text(step.compression, self.optimizer, with_tolerance=True)
                if step.compression.is_on
                else "",
            ]
            for step in self._sorted()
        ]
        return [Sentences(self.sentences), Table(["method", "step", "", "pays off", "loss"], rows)]

    def _ipython_display_(self) -> None:
        """Show the sentences and the curve in a notebook."""
        from IPython.display import Markdown, display

        figures = importlib.import_module("shardscope_widgets.figures")  # a higher floor
        first, *rest = self.sentences
        display(Markdown("\n\n".join([f"**{first}**", *rest])))
        display(figures.compression_speedup(self))


def below_text(bandwidth: float, above: float = inf) -> str:
    """Return the range in which a method pays off as text, given the bandwidths below and above which it
    does: ``below 271 Mbit/s``.
    """
    if not bandwidth:
        return "never" if above == inf else f"above {bit_rate_text(above)}"
    return "on any link" if bandwidth == inf else f"below {bit_rate_text(bandwidth)}"


def _between(low: float, high: float) -> str:
    """Return a range of bandwidths, with the unit once if both have the same: ``65 and 271 Mbit/s``."""
    first, last = bit_rate_text(low), bit_rate_text(high)
    (number, unit), same = first.split(), last.split()[1]
    return f"{number if unit == same else first} and {last}"
