"""The memory part of `shardscope scoreboard`: published peaks and out-of-memory errors beside predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.commands._json import as_json
from shardscope.commands._table import aligned

if TYPE_CHECKING:
    from shardscope.measure.scoreboard.memory.board import FitLine, PeakLine

WORDS = {
    "allocated": "tensors",
    "reserved": "reserved by the allocator",
    "process": "process (nvidia-smi)",
}


def print_memory(*, to_json: bool) -> None:
    """Print how well published memory is predicted: peaks, and which runs fit."""
    from shardscope.measure.scoreboard.memory.board import (
        fit_lines,
        memory_tables,
        peak_lines,
        runs_that_ran,
        total_fits,
        without_largest,
    )

    tables = memory_tables()
    peaks, fits = peak_lines(tables), fit_lines(tables | runs_that_ran())
    if to_json:
        print(
            as_json({"peaks": [line._asdict() for line in peaks], "fits": [line._asdict() for line in fits]})
        )
        return
    total, others = total_fits(fits), without_largest(fits)
    print(
        f"Peak memory of the fullest device\n{peaks_text(peaks)}\n\n"
        f"Does it fit\n{fits_text([*fits, total, others])}\n\n"
        f"{total.foreseen} of {total.ran_out} runs that ran out of memory "
        f"({100 * total.foreseen / total.ran_out:.0f} %) are predicted to, and {others.foreseen} of {others.ran_out} "
        f"({100 * others.foreseen / others.ran_out:.0f} %) {others.dataset}; "
        f"{total.refused} of {total.ran} that ran ({100 * total.refused / total.ran:.1f} %) are wrongly refused"
    )


def peaks_text(lines: list[PeakLine]) -> str:
    """Return a table of the errors of predicted peaks."""
    return aligned(
        ["data set", "rows", "memory model", "what was measured", "n", "MAPE", "worst", "bias"],
        [
            (
                line.dataset, line.rows, line.framework, WORDS[line.counted], str(line.runs),
                f"{line.mape:.2f} %", f"{line.worst:.2f} %", f"{line.bias:+.2f} %",
            )
            for line in lines
        ],
    )  # fmt: skip


def fits_text(lines: list[FitLine]) -> str:
    """Return a table of how often "fits" was right."""
    return aligned(
        ["data set", "runs that ran", "wrongly refused", "out of memory", "predicted"],
        [
            (line.dataset, str(line.ran), str(line.refused), str(line.ran_out), str(line.foreseen))
            for line in lines
        ],
    )
