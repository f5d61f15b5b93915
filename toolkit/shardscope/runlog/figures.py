"""The metrics of a run: each has one definition, one label and one format, wherever it is shown.

Status lines, tables, plots, reports and the command line take labels and texts from here, and values from `Summary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from shardscope.spec.units import bytes_text, duration_text, three_digits

LOSS_WINDOW = 10
"""Number of steps at the end of a run over which `loss_mean` is averaged."""


def loss_text(loss: float) -> str:
    """Format a loss with four decimals, or with three digits if it is tiny or huge: ``3.2552``, ``4.03e-07``,
    ``4.03e+07``.
    """
    if 0 < abs(loss) < 1e-3:
        return f"{loss:.2e}"
    if abs(loss) < 100 or not math.isfinite(loss):
        return f"{loss:.4f}"
    return f"{loss:,.1f}" if abs(loss) < 1e5 else f"{loss:.2e}"


class RunFigure(NamedTuple):
    """A metric of a run: its name, description and format.

    Attributes:
        title: Short name, for headings and legends.
        about: Short description, for explanations and tooltips.
        text: Function that formats a value.
        ranks: Which ranks the metric covers, such as ``all ranks``; empty if the title already says so.
    """

    title: str
    about: str
    text: Callable[[float], str]
    ranks: str = ""

    @property
    def label(self) -> str:
        """The title and the ranks that the metric covers, for tables: ``sent per step (all ranks)``."""
        return f"{self.title} ({self.ranks})" if self.ranks else self.title


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else three_digits(value)


FIGURES = {
    "last_step": RunFigure("steps", "the last step that all ranks have finished", lambda value: f"{value:.0f}"),
    "loss": RunFigure("loss", "training loss of the last finished step, mean over ranks", loss_text),
    "loss_mean": RunFigure(
        f"mean loss (last {LOSS_WINDOW} steps)",
        f"training loss, mean over ranks and over the last {LOSS_WINDOW} finished steps", loss_text,
    ),
    "validation_loss": RunFigure(
        "validation loss", "loss in the last evaluation on the validation split", loss_text
    ),
    "test_loss": RunFigure("test loss", "loss on the test split, after the last step", loss_text),
    "test_accuracy": RunFigure(
        "test accuracy", "fraction of correct predictions on the test split", lambda value: f"{value:.1%}"
    ),
    "step_time_s": RunFigure(
        "step time", "median over steps of the slowest rank, without warm-up", duration_text
    ),
    "samples_per_s": RunFigure(
        "samples/s", "samples of all ranks per second, at the median step time", _count
    ),
    "tokens_per_s": RunFigure(
        "tokens/s", "tokens of all ranks per second, at the median step time", _count
    ),
    "bytes_per_step": RunFigure(
        "sent per step", "bytes sent by all ranks together, mean over steps", bytes_text, "all ranks"
    ),
    "held_bytes": RunFigure(
        "peak memory per rank",
        "peak memory of parameters, gradients, optimizer state, activations and buffers together, on the "
        "rank with the highest peak, in the newest measured step; without the batch and temporary tensors",
        bytes_text,
    ),
    "process_bytes": RunFigure(
        "process memory growth per rank",
        "growth of the memory of a rank's process, as counted by the operating system, from before the "
        "model was built to its peak, on the rank with the largest growth; on a GPU, the peak of "
        "PyTorch's allocations",
        bytes_text,
    ),
    "mfu": RunFigure(
        "MFU",
        "model FLOPs utilization at the median step time: model FLOPs (3 x forward) divided by the processors' peak; "
        "on this machine, by the calibrated rate of matrix products",
        lambda value: f"{value:.1%}",
    ),
    "link_utilization": RunFigure(
        "link utilization",
        "bytes that the busiest rank sends in a step, divided by the bytes that its link can carry in that time",
        lambda value: f"{value:.1%}",
    ),
    "expert_imbalance": RunFigure(
        "expert imbalance",
        "tokens of the busiest expert relative to an even load, mean over layers and the newest steps",
        lambda value: f"{value:.2f} ×",
    ),
    "dropped_tokens": RunFigure(
        "dropped tokens", "fraction of the routed tokens that were dropped, because their expert was full, in the "
        "newest steps", lambda value: f"{value:.1%}",
    ),
    "restarts": RunFigure("restarts", "number of times that the ranks were restarted after a failure", _count),
    "lost_steps": RunFigure("lost steps", "finished steps that restarts had to repeat", _count),
    "goodput": RunFigure(
        "goodput", "fraction of the time spent in steps that count: not repeated after a failure",
        lambda value: f"{value:.1%}",
    ),
}  # fmt: skip
"""The metrics of a run by name of the field of `Summary`."""


def figure_text(name: str, value: float | None, missing: str = "–") -> str:
    """Format the value of a metric; `missing` if it is unknown."""
    return missing if value is None else FIGURES[name].text(value)


def change_text(name: str, value: float | None, base: float | None) -> str:
    """Format the change of a metric relative to a baseline: ``-12.0 %``, ``2.4 ×``; empty if equal or unknown.

    Losses and accuracies are written as differences, because their ratios are not meaningful.
    """
    if value is None or base is None or value == base or not math.isfinite(value - base):
        return ""
    if "loss" in name:
        return f"{'+' if value > base else '-'}{loss_text(abs(value - base))}"
    if "accuracy" in name:
        return f"{100 * (value - base):+.1f} points"
    if base <= 0:
        return ""
    ratio = value / base
    return f"{three_digits(ratio)} ×" if ratio >= 2 or ratio <= 0.5 else f"{100 * (ratio - 1):+.1f} %"
