"""A progress line during a run, and a summary table at its end. Reads events and metrics, but needs no `Run`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from shardscope.commands._output import aligned, human_bytes
from shardscope.runlog.figures import FIGURES, figure_text, loss_text
from shardscope.runlog.reducer import RunLog
from shardscope.runtime.record.bar import bar, is_terminal
from shardscope.spec.units import duration_text

if TYPE_CHECKING:
    from shardscope.runtime import Summary


class Progress:
    """Progress line for the latest step that all ranks have finished.

    On a terminal, the line is rewritten in place. Otherwise, a new line is printed after each tenth of the steps.
    """

    def __init__(self, steps: int, log: RunLog, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._log, self._steps, self._quiet = log, steps, quiet
        self._stream = stream or sys.stderr
        self._rewrite = is_terminal(self._stream)
        self._printed_tenth = -1

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Process new events, and redraw the progress line if they complete a step."""
        before = self.last_step
        self._log.feed(events)
        if self.last_step > before and not self._quiet:
            self._draw()

    @property
    def last_step(self) -> int:
        """Number of the last step that all ranks have finished; 0 before the first."""
        return self._log.last_step

    def line(self) -> str:
        """Return the current progress line."""
        step = self._log.steps[-1]
        loss = f"{FIGURES['loss'].label} {loss_text(step.loss)}"
        figures = f"{loss}  {duration_text(step.step_time_s)}/step  {step.samples_per_s:,.0f} samples/s"
        return f"{bar(step.number / self._steps)} {step.number}/{self._steps}  {figures}"

    def close(self) -> None:
        """End the progress line with a newline, so that later output does not overwrite it on a terminal."""
        if self._rewrite and not self._quiet and self._log.steps:
            self._stream.write("\n")

    def _draw(self) -> None:
        tenth = 10 * self.last_step // self._steps
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}")
        elif tenth > self._printed_tenth:
            self._printed_tenth = tenth
            self._stream.write(f"{self.line()}\n")
        self._stream.flush()


def table(summary: Summary) -> str:
    """Return the summary of a run as a table: a header and one row."""
    counted = "samples_per_s" if summary.tokens_per_s is None else "tokens_per_s"
    shown = ("loss", "loss_mean", "test_loss", "test_accuracy", "step_time_s", counted, "bytes_per_step")
    columns = {
        "strategy": summary.strategy or "?",
        "ranks": summary.world_sizes or str(summary.world_size),
        "steps": str(summary.steps),
        **_figures(summary, shown),
        **_compression(summary),
        **_figures(summary, ("held_bytes", "process_bytes")),
        **_figures(
            summary, [name for name in ("mfu", "link_utilization") if getattr(summary, name) is not None]
        ),
        **({"link": summary.link} if summary.link else {}),
    }
    notes = [f"\nlink: {summary.link_note}"] if summary.link_note else []
    if summary.straggler is not None:
        notes.append(f"\n{summary.straggler[0].upper()}{summary.straggler[1:]}.")
    if summary.shares is not None:
        notes.append(f"\nSamples per rank, by measured speed: {summary.shares}.")
    if summary.loss_note is not None:
        notes.append(f"\n{summary.loss_note[0].upper()}{summary.loss_note[1:]}.")
    if summary.optimizer_note is not None:
        notes.append(f"\nNote: {summary.optimizer_note}.")
    if summary.resize_s is not None:
        notes.append(f"\nNo rank trained for {duration_text(summary.resize_s)} while their number changed.")
    if summary.diverged_at is not None:
        notes.append(
            f"\nThe loss diverged at step {summary.diverged_at}; lower the learning rate or warm it up."
        )
    return aligned(list(columns), [list(columns.values())]) + "".join(notes)


def _figures(summary: Summary, names: Iterable[str]) -> dict[str, str]:
    """Return values of the summary as text, by label."""
    return {FIGURES[name].label: figure_text(name, getattr(summary, name), "-") for name in names}


def _compression(summary: Summary) -> dict[str, str]:
    """Return the additional columns for a compressed run; an empty dictionary without compression.

    The columns are the uncompressed bytes per step, the compression ratio, and the codec time per step.
    """
    if summary.compression is None:
        return {}
    ratio = summary.bytes_ratio
    return {
        "uncompressed": human_bytes(summary.uncompressed_bytes_per_step),
        "ratio": "-" if ratio is None else f"{ratio:.1f}x",
        "codec": "-" if summary.codec_s_per_step is None else duration_text(summary.codec_s_per_step),
    }
