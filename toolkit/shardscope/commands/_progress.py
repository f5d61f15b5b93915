"""One line of progress during a run, and a table at its end. Depends on events and metrics, but not on runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from shardscope.commands._table import aligned, human_bytes
from shardscope.runlog.reducer import RunLog
from shardscope.runtime.bar import bar, is_terminal

if TYPE_CHECKING:
    from shardscope.runtime import Summary


class Progress:
    """Progress line for the latest step that all ranks have finished.

    On a terminal it is rewritten in place; elsewhere it is printed every tenth of the run.
    """

    def __init__(
        self, steps: int, world_size: int, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self._log = RunLog(world_size=world_size)
        self._steps, self._quiet = steps, quiet
        self._stream = stream or sys.stderr
        self._rewrite = is_terminal(self._stream)
        self._printed_tenth = -1

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Process new events, and update the line if they complete a step."""
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
        figures = (
            f"loss {step.loss:.4f}  {step.step_time_s * 1e3:.1f} ms/step  {step.samples_per_s:,.0f} samples/s"
        )
        return f"{bar(step.number / self._steps)} {step.number}/{self._steps}  {figures}"

    def close(self) -> None:
        """Keep the last line on the terminal."""
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
    tokens = summary.tokens_per_s is not None
    rate = summary.tokens_per_s if tokens else summary.samples_per_s
    columns = {
        "strategy": summary.strategy or "?",
        "ranks": str(summary.world_size),
        "steps": str(summary.steps),
        "loss": _shown(summary.loss, ".4f"),
        "test loss": _shown(summary.test_loss, ".4f"),
        "test accuracy": _shown(summary.test_accuracy, ".1%"),
        "step time": _shown(summary.step_time_s, ".4f", " s"),
        "tokens/s" if tokens else "samples/s": _shown(rate, ",.0f"),
        "sent a step": human_bytes(summary.bytes_per_step),
        **_compression(summary),
        "peak memory": human_bytes(summary.peak_memory_bytes),
        **({"link": summary.link} if summary.link else {}),
    }
    note = f"\nlink: {summary.link_note}" if summary.link_note else ""
    return aligned(list(columns), [list(columns.values())]) + note


def _compression(summary: Summary) -> dict[str, str]:
    """Return the cells of a compressed run: uncompressed bytes per step, compression ratio, and codec time per step."""
    if summary.compression is None:
        return {}
    ratio = summary.bytes_ratio
    return {
        "uncompressed": human_bytes(summary.uncompressed_bytes_per_step),
        "ratio": "-" if ratio is None else f"{ratio:.1f}x",
        "codec": _shown(summary.codec_s_per_step, ".4f", " s"),
    }


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
