"""`shardscope scoreboard`: compare published step times with our predictions and with two trivial formulas."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from shardscope.commands._json import as_json
from shardscope.commands._rows import add_rows_options, given_to_rows, refuse_without_rows
from shardscope.commands._scoreboard_memory import print_memory
from shardscope.commands._table import aligned
from shardscope.errors import SpecError

if TYPE_CHECKING:
    from shardscope.calibration.effects import TableScore
    from shardscope.measure.scoreboard.board import Line, RowScore
    from shardscope.measure.scoreboard.score import Score


ABOUT = """\
Compare predicted step times with measured ones.

Columns:
  MAPE, worst, rank    mean and largest error, and rank correlation
  best chosen          groups of layouts of one model and batch on the same number
                       of devices, in which the layout with the shortest predicted
                       time is within 3% of the fastest measured one
  in interval          share of measured times inside the 90% interval
  after one step       error of the other rows after one row of the table was
                       measured: the median over which one

The first list has the tables that ship, predicted as your layouts are; constants
were fitted to those marked as fitted.

The second list has all tables, each predicted by constants fitted without it, as
linearised around those fitted to all. Large tables are represented by rows drawn
at random. The list is somewhat optimistic for a cluster of your own: several
tables are of one cluster (such as four of Selene and two of BLOOM's), and the
others of that cluster stay when one is left out, and the widths of two priors were
chosen with these errors in view. FSDP of Lightning was timed with a
counter of FLOPs around each step, which may have made its steps slower; it is
scored, but no constant was fitted to it.

The third list tests whether intervals contain 90% of measured times. p is that of
a two-sided binomial test; with 20 rows it finds intervals that are far too narrow,
but never rejects wide ones. The interval score is the mean of that of the
logarithms in per cent (Winkler 1972; less is better), beside the score of
intervals with a constant relative width, chosen on the other tables.

With --rows, your own steps are compared instead. The options of a layout are
settings of all rows, which their columns override.

With --memory, published peaks of memory are compared instead, and runs that ran or
ran out of memory with what predictions say about them; each run counts once.
Peaks are marked as fitted if values of the memory model were inferred from them
(for which ones, see shardscope.analytic.memory.frameworks), or if they showed that
a part was missing (the buckets of PyTorch's DDP).
"""


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "scoreboard",
        help="compare predicted step times with published ones",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_rows_options(parser, purpose="compare these measured steps instead of published ones")
    parser.add_argument("--memory", action="store_true", help="compare memory instead of step times")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one line per data set, as predicted now and as predicted without it."""
    from shardscope.calibration.effects import table_scores
    from shardscope.measure.scoreboard.board import board
    from shardscope.measure.scoreboard.intervals import ENOUGH
    from shardscope.measure.scoreboard.published import published

    if arguments.rows is not None:
        if arguments.memory:
            raise SpecError(
                "--memory compares published memory and has no effect on --rows; give one of the two"
            )
        print_own(arguments)
        return 0
    refuse_without_rows(arguments, instead="--memory" if arguments.memory else "")
    if arguments.memory:
        print_memory(to_json=arguments.json)
        return 0
    lines, left_out = board(published(), fitted=True), table_scores()
    if arguments.json:
        scores = {name: score._asdict() for name, score in left_out.items()}
        print(as_json({"tables": [_plain(line) for line in lines], "left_out": scores}))
    else:
        most = max(score.rows for score in left_out.values())
        print(
            f"Predicted as your layouts are\n{text(lines)}\n\n"
            f"Predicted without the table (of larger tables, {most} rows drawn at random)\n{left_out_text(left_out)}"
            f"\n\nIntervals without the table, of tables with at least {ENOUGH} rows\n{intervals_text(left_out)}"
        )
    return 0


def print_own(arguments: argparse.Namespace) -> None:
    """Print how well steps that a user measured are predicted: all together, and each."""
    from shardscope.measure.calibrate.tables import read_rows
    from shardscope.measure.scoreboard.board import board, row_scores

    rows = read_rows(arguments.rows, given_to_rows(arguments))
    lines, each = board({arguments.rows.stem: rows}), row_scores(rows)
    if arguments.json:
        print(as_json({"tables": [_plain(line) for line in lines], "rows": [row._asdict() for row in each]}))
    else:
        print(f"{text(lines)}\n\n{rows_text(each)}")


def rows_text(rows: Sequence[RowScore]) -> str:
    """Return a table of measured and predicted times, by row."""
    from shardscope.planner.explain import seconds

    header = ["step", "measured", "predicted", "error", "90 % interval"]
    return aligned(
        header,
        [
            (
                row.label, seconds(row.measured_s), seconds(row.predicted_s),
                f"{100 * (row.predicted_s / row.measured_s - 1):+.1f} %",
                f"{seconds(row.low_s)} to {seconds(row.high_s)}{'' if row.is_inside else ' (missed)'}",
            )
            for row in rows
        ],
    )  # fmt: skip


def left_out_text(scores: Mapping[str, TableScore]) -> str:
    """Return a table of the scores of left-out tables, with their medians and worst values."""
    fields = ("left_out", "after", "one_scalar", "covered", "plain", "constant_mfu")
    header = [
        "data set", "n", "MAPE", "after one step", "by its scale alone", "in interval", "plain formula", "constant MFU",
    ]  # fmt: skip

    def cells(name: str, rows: str, values: Sequence[float]) -> tuple[str, ...]:
        digits = (1, 1, 1, 0, 1, 1)
        return name, rows, *(f"{value:.{place}f} %" for value, place in zip(values, digits, strict=True))

    table = [[getattr(score, field) for field in fields] for score in scores.values()]
    lines = [
        cells(name, str(score.rows), row) for (name, score), row in zip(scores.items(), table, strict=True)
    ]
    columns = list(zip(*table, strict=True))
    lines.append(cells("median", "", [median(column) for column in columns]))
    worst = [
        min(column) if field == "covered" else max(column)
        for field, column in zip(fields, columns, strict=True)
    ]
    lines.append(cells("worst", "", worst))
    return f"{aligned(header, lines)}\n{_beaten(scores)}"


def _beaten(scores: Mapping[str, TableScore]) -> str:
    """Return a sentence that names the tables that a trivial formula predicts better."""
    names = [name for name, each in scores.items() if each.left_out > min(each.plain, each.constant_mfu)]
    told = f"A trivial formula predicts {len(names)} of {len(scores)} tables better"
    return f"{told}: {'; '.join(names)}." if names else f"{told}."


def intervals_text(scores: Mapping[str, TableScore]) -> str:
    """Return a table of the coverage and the interval score of left-out tables with enough rows for a test."""
    from shardscope.measure.scoreboard.intervals import ENOUGH

    header = [
        "data set", "n", "in interval", "p", "interval score", "constant width",
        "in interval after one step", "p after", "interval score after", "constant width after",
    ]  # fmt: skip
    rows = [
        (
            name, str(score.rows),
            f"{score.covered:.0f} %", f"{score.p_value:.3f}",
            f"{score.interval_score:.0f}", f"{score.constant_interval_score:.0f}",
            f"{score.covered_after:.0f} %", f"{score.p_value_after:.3f}",
            f"{score.interval_score_after:.0f}", f"{score.constant_interval_score_after:.0f}",
        )
        for name, score in scores.items()
        if score.rows >= ENOUGH
    ]  # fmt: skip
    return aligned(header, rows)


def text(lines: list[Line]) -> str:
    """Return a table of MAPE, worst error and rank correlation by data set, and the scores of both trivial formulas."""
    header = [
        "data set",
        "rows",
        "n",
        "MAPE",
        "worst",
        "rank",
        "best chosen",
        "in interval",
        "after one step",
        "plain, after one",
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
            f"{line.ranking.near} of {line.ranking.groups}" if line.ranking.groups else "-",
            f"{line.one_step.covered:.0f} %",
            f"{line.one_step.after:.1f} %",
            f"{line.scaled_plain:.1f} %",
            f"{line.plain.mape:.1f} %, {line.plain.rank:.3f}",
            f"{line.constant_mfu.mape:.1f} %, {line.constant_mfu.rank:.3f}",
            ", ".join(line.calibrations),
        )
        for line in lines
    ]
    return aligned(header, rows)


def _plain(line: Line) -> dict[str, object]:
    def figures(score: Score) -> dict[str, float]:
        return {"mape_percent": score.mape, "worst_percent": score.worst, "rank_correlation": score.rank}

    return {
        "dataset": line.dataset,
        "rows": line.rows,
        "n": line.score.rows,
        **figures(line.score),
        "groups": line.ranking.groups,
        "groups_with_best_chosen": line.ranking.near,
        "covered_percent": line.one_step.covered,
        "after_one_step_mape_percent": line.one_step.after,
        "covered_after_one_step_percent": line.one_step.covered_after,
        "interval_score_percent": line.one_step.interval_score,
        "interval_score_after_one_step_percent": line.one_step.interval_score_after,
        "plain_after_one_step_mape_percent": line.scaled_plain,
        "plain_formula": figures(line.plain),
        "constant_mfu": figures(line.constant_mfu),
        "calibrations": list(line.calibrations),
    }
