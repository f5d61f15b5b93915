"""The memory part of `shardscope scoreboard`: published peaks and out-of-memory errors beside predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardscope.commands._json import as_json
from shardscope.commands._table import aligned

WORDS = {
    "allocated": "tensors",
    "reserved": "reserved by the allocator",
    "process": "process (nvidia-smi)",
}


def print_memory(scores: Mapping[str, Any], *, to_json: bool) -> None:
    """Print how well published memory is predicted: peaks, and which runs fit."""
    if to_json:
        print(as_json({"peaks": scores["peaks"], "fits": scores["fits"]}))
        return
    total, others = scores["total"], scores["without_largest"]

    def foreseen(line: Mapping[str, Any]) -> str:
        return f"({100 * line['foreseen'] / line['ran_out']:.0f} %)"

    print(
        f"Peak memory of the fullest device\n{peaks_text(scores['peaks'])}\n\n"
        f"Does it fit\n{fits_text([*scores['fits'], total, others])}\n\n"
        f"{total['foreseen']} of {total['ran_out']} runs that ran out of memory {foreseen(total)} are predicted to, "
        f"and {others['foreseen']} of {others['ran_out']} {foreseen(others)} {others['dataset']}; "
        f"{total['refused']} of {total['ran']} that ran ({100 * total['refused'] / total['ran']:.1f} %) "
        "are wrongly refused"
    )


def peaks_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the errors of predicted peaks."""
    return aligned(
        ["data set", "rows", "memory model", "what was measured", "n", "MAPE", "worst", "bias"],
        [
            (
                line["dataset"], line["rows"], line["framework"], WORDS[line["counted"]], str(line["runs"]),
                f"{line['mape']:.2f} %", f"{line['worst']:.2f} %", f"{line['bias']:+.2f} %",
            )
            for line in lines
        ],
    )  # fmt: skip


def fits_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of how often "fits" was right."""
    names = ("dataset", "ran", "refused", "ran_out", "foreseen")
    return aligned(
        ["data set", "runs that ran", "wrongly refused", "out of memory", "predicted"],
        [tuple(str(line[name]) for name in names) for line in lines],
    )
