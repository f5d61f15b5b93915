"""`shardscope scoreboard`: compare published step times with our predictions and with two trivial formulas."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardscope.commands._json import as_json
from shardscope.commands._table import aligned
from shardscope.spec.calibration import Calibration

if TYPE_CHECKING:
    from shardscope.measure.scoreboard.board import Line
    from shardscope.measure.scoreboard.score import Score


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "scoreboard",
        help="compare predicted step times with published ones",
        description="Compare predicted step times with those in the tables of four papers; no calibration was fitted "
        "to these tables.",
    )
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one line per data set."""
    from shardscope.measure.scoreboard.board import board
    from shardscope.measure.scoreboard.tables import published

    lines = board(published())
    print(as_json([_plain(line) for line in lines]) if arguments.json else text(lines))
    return 0


def text(lines: list[Line]) -> str:
    """Return a table of MAPE, worst error and rank correlation by data set, and the scores of both trivial formulas."""
    header = [
        "data set",
        "rows",
        "n",
        "MAPE",
        "worst",
        "rank",
        "plain formula",
        "constant MFU",
        "calibration",
    ]
    rows = [
        (
            line.dataset,
            line.rows,
            str(line.score.rows),
            f"{line.score.mape:.1f} %",
            f"{line.score.worst:.1f} %",
            f"{line.score.rank:.3f}",
            f"{line.plain.mape:.1f} %, {line.plain.rank:.3f}",
            f"{line.constant_mfu.mape:.1f} %, {line.constant_mfu.rank:.3f}",
            ", ".join(line.calibrations),
        )
        for line in lines
    ]
    names = sorted({name for line in lines for name in line.calibrations})
    notes = [f"{name}: {note}." for name in names if (note := Calibration.of(name).note)]
    return "\n".join([aligned(header, rows), "", *notes])


def _plain(line: Line) -> dict[str, object]:
    def figures(score: Score) -> dict[str, float]:
        return {"mape_percent": score.mape, "worst_percent": score.worst, "rank_correlation": score.rank}

    return {
        "dataset": line.dataset,
        "rows": line.rows,
        "n": line.score.rows,
        **figures(line.score),
        "plain_formula": figures(line.plain),
        "constant_mfu": figures(line.constant_mfu),
        "calibrations": list(line.calibrations),
    }
