"""One line of progress during a run, and a table at its end. Depends on events and figures, but not on runs."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from shardscope.commands._table import aligned, human_bytes
from shardscope.runtime.bar import bar, is_terminal
from shardscope.runtime.summary import mean_loss

if TYPE_CHECKING:
    from shardscope.runtime import Summary


class Progress:
    """Progress line of the latest step that every rank has finished.

    It is rewritten in place on a terminal, and printed every tenth of the run elsewhere.
    """

    def __init__(
        self, steps: int, world_size: int, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.step = 0
        self.loss = math.nan
        self.step_time_s = math.nan
        self.samples_per_s = math.nan
        self._steps, self._world_size, self._quiet = steps, world_size, quiet
        self._stream = stream or sys.stderr
        self._rewrite = is_terminal(self._stream)
        self._open: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        self._printed_tenth = -1

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Process new events, and draw if they complete a step."""
        before = self.step
        for event in events:
            if event["event"] == "step":
                self._take(event)
        if self.step > before and not self._quiet:
            self._draw()

    def line(self) -> str:
        """The current progress line."""
        figures = (
            f"loss {self.loss:.4f}  {self.step_time_s * 1e3:.1f} ms/step  {self.samples_per_s:,.0f} samples/s"
        )
        return f"{bar(self.step / self._steps)} {self.step}/{self._steps}  {figures}"

    def close(self) -> None:
        """Keep the last line on the terminal."""
        if self._rewrite and not self._quiet and self.step:
            self._stream.write("\n")

    def _take(self, event: Mapping[str, Any]) -> None:
        step = int(event["step"])
        ranks = self._open[step]
        ranks.append(event)
        if len(ranks) < self._world_size:
            return
        del self._open[step]
        self.step = max(self.step, step)
        loss = mean_loss(ranks)
        self.loss = math.nan if loss is None else loss
        self.step_time_s = max(float(rank["step_time_s"]) for rank in ranks)
        self.samples_per_s = sum(float(rank["samples"]) for rank in ranks) / self.step_time_s

    def _draw(self) -> None:
        tenth = 10 * self.step // self._steps
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}")
        elif tenth > self._printed_tenth:
            self._printed_tenth = tenth
            self._stream.write(f"{self.line()}\n")
        self._stream.flush()


def table(summary: Summary) -> str:
    """The summary of a run as a table: a header and one row."""
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
    """Cells of a compressed run: uncompressed bytes per step, compression ratio, and codec time per step."""
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
