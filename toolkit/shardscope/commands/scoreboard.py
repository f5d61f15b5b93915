"""`shardscope scoreboard`: compare published step times with our predictions and with two trivial formulas."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import isnan, nan
from statistics import median
from typing import TYPE_CHECKING, Any

from shardscope.commands._output import aligned, as_json
from shardscope.commands._rows import add_rows_options, given_to_rows, refuse_without_rows
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout
from shardscope.spec.units import plural

if TYPE_CHECKING:
    from shardscope.measure.calibrate.rows import RowScore

ABOUT = """\
Compare predicted step times with published ones: predicted as for your own layouts, and
from a calibration with all other tables. Scores are those of this release. In the tables,
"best chosen" is the number of groups of layouts in which the predicted fastest is at
most 3% slower than the actual fastest, and "after one step" is the error of the other rows
after calibration with one measured row. With --rows, your own steps are compared; options of
a layout, such as --tensor, then apply to all rows, and columns of the table override them.
"""

MEASURED_AS = {
    "allocated": "tensors",
    "reserved": "reserved by the allocator",
    "process": "process (nvidia-smi)",
}


class _WithoutLayout(argparse.RawDescriptionHelpFormatter):
    """Help formatter that omits the options of a layout, which the help of `shardscope predict` explains."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in Layout.model_fields:
            super().add_argument(action)


HELP = "compare predicted step times with published ones"
PARSER = {
    "usage": "shardscope scoreboard [--rows FILE [options of the rows] | --memory] [--json]",
    "formatter_class": _WithoutLayout,
}
JSON = "print the scores as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_rows_options(parser, purpose="compare these measured steps instead of published ones")
    parser.add_argument("--memory", action="store_true", help="compare memory instead of step times")


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one line per data set, with the prediction errors with and without its rows in the calibration."""
    from shardscope.calibration.effects import table_scores

    if arguments.rows is not None:
        if arguments.memory:
            raise SpecError(
                "--memory compares published memory and has no effect on --rows; give one of the two"
            )
        print_own(arguments)
        return 0
    refuse_without_rows(arguments, instead="--memory" if arguments.memory else "")
    if arguments.memory:
        print_memory(shipped_scores()["memory"], to_json=arguments.json)
        return 0
    lines, left_out = shipped_scores()["tables"], table_scores()
    if arguments.json:
        print(as_json({"tables": lines, "left_out": left_out}))
    else:
        most = max(int(score["rows"]) for score in left_out.values())
        print(
            f"Predicted as for your own layouts\n{text(lines)}\n\n"
            f"Predicted without the table (of larger tables, {most} rows drawn at random)\n{left_out_text(left_out)}"
        )
    return 0


def shipped_scores() -> dict[str, Any]:
    """Return the scores of predictions of published step times and memory, from `tests/published/shipped.py`."""

    def defined(found: dict[str, Any]) -> dict[str, Any]:
        return {name: nan if value is None else value for name, value in found.items()}

    text = (files("shardscope.calibration") / "catalogue" / "scores.json").read_text("utf-8")
    return dict(json.loads(text, object_hook=defined))


def print_own(arguments: argparse.Namespace) -> None:
    """Print the errors of predictions for steps that a user has measured: in total, and for each step."""
    import numpy as np

    from shardscope.measure.calibrate.rows import Score, calibration_of_row, row_scores
    from shardscope.measure.calibrate.tables import read_rows

    rows = read_rows(arguments.rows, given_to_rows(arguments))
    each = row_scores(rows)
    score = Score.of(
        *(np.array([getattr(row, name) for row in each]) for name in ("predicted_s", "measured_s"))
    )
    covered = 100 * sum(row.is_inside for row in each) / len(each)
    used = list(dict.fromkeys(calibration_of_row(row).name for row in rows))
    if arguments.json:
        line = {
            "dataset": arguments.rows.stem, "n": score.rows, "mape_percent": score.mape, "worst_percent": score.worst,
            "rank_correlation": score.rank, "covered_percent": covered, "calibrations": used,
        }  # fmt: skip
        print(as_json({"tables": [line], "rows": [row._asdict() for row in each]}))
        return
    rank = "" if isnan(score.rank) else f", rank correlation {score.rank:.3f}"
    print(
        f"{rows_text(each)}\n\n"
        f"{plural(score.rows, 'step')}: mean error {score.mape:.1f} %, largest {score.worst:.1f} %, {covered:.0f} % "
        f"inside the interval{rank}; predicted with {', '.join(used)}"
    )


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


def left_out_text(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the scores of held-out tables, with median and worst values."""
    fields = ("left_out", "after", "one_scalar", "covered", "plain", "constant_mfu")
    header = [
        "data set", "n", "MAPE", "after one step", "by its scale alone", "in interval", "plain formula", "constant MFU",
    ]  # fmt: skip

    def cells(name: str, rows: str, values: Sequence[float]) -> tuple[str, ...]:
        digits = (1, 1, 1, 0, 1, 1)
        return name, rows, *(f"{value:.{place}f} %" for value, place in zip(values, digits, strict=True))

    table = [[score[field] for field in fields] for score in scores.values()]
    lines = [
        cells(name, str(int(score["rows"])), row)
        for (name, score), row in zip(scores.items(), table, strict=True)
    ]
    columns = list(zip(*table, strict=True))
    lines.append(cells("median", "", [median(column) for column in columns]))
    worst = [
        min(column) if field == "covered" else max(column)
        for field, column in zip(fields, columns, strict=True)
    ]
    lines.append(cells("worst", "", worst))
    return f"{aligned(header, lines)}\n{_beaten(scores)}"


def _beaten(scores: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence that names the tables that a trivial formula predicts better."""
    names = [
        name for name, each in scores.items() if each["left_out"] > min(each["plain"], each["constant_mfu"])
    ]
    told = f"A trivial formula predicts {len(names)} of {len(scores)} tables better"
    return f"{told}: {'; '.join(names)}." if names else f"{told}."


def text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table, by data set, of the errors of the predictions and of both trivial formulas."""
    header = [
        "data set", "rows", "n", "MAPE", "worst", "rank", "best chosen", "in interval", "after one step",
        "plain, after one", "plain formula", "constant MFU", "calibration",
    ]  # fmt: skip

    def formula(score: Mapping[str, float]) -> str:
        return f"{score['mape_percent']:.1f} %, {score['rank_correlation']:.3f}"

    rows = [
        (
            line["dataset"], line["rows"], str(line["n"]), f"{line['mape_percent']:.1f} %",
            f"{line['worst_percent']:.1f} %", f"{line['rank_correlation']:.3f}",
            f"{line['groups_with_best_chosen']} of {line['groups']}" if line["groups"] else "-",
            f"{line['covered_percent']:.0f} %", f"{line['after_one_step_mape_percent']:.1f} %",
            f"{line['plain_after_one_step_mape_percent']:.1f} %", formula(line["plain_formula"]),
            formula(line["constant_mfu"]), ", ".join(line["calibrations"]),
        )
        for line in lines
    ]  # fmt: skip
    return aligned(header, rows)


def print_memory(scores: Mapping[str, Any], *, to_json: bool) -> None:
    """Print the errors of predictions for published memory: of peaks, and of whether runs fit."""
    if to_json:
        print(as_json({"peaks": scores["peaks"], "fits": scores["fits"]}))
        return
    total, others = scores["total"], scores["without_largest"]

    def foreseen(line: Mapping[str, Any]) -> str:
        return f"({100 * line['foreseen'] / line['ran_out']:.0f} %)"

    print(
        f"Peak memory per device\n{peaks_text(scores['peaks'])}\n\n"
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
                line["dataset"], line["rows"], line["framework"], MEASURED_AS[line["counted"]], str(line["runs"]),
                f"{line['mape']:.2f} %", f"{line['worst']:.2f} %", f"{line['bias']:+.2f} %",
            )
            for line in lines
        ],
    )  # fmt: skip


def fits_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the number of correct predictions of whether a run fits."""
    names = ("dataset", "ran", "refused", "ran_out", "foreseen")
    return aligned(
        ["data set", "runs that ran", "wrongly refused", "out of memory", "predicted"],
        [tuple(str(line[name]) for name in names) for line in lines],
    )
