"""Text and table of a calibration of CPU ranks: each constant with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardscope.calibration.constants import CONSTANTS, amounts_text
from shardscope.show import Part, Sentences, Table
from shardscope.spec.units import plural

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.calibration.host_calibration import Constant, HostCalibration

HEADER = ("constant", "for", "value", "90% interval", "meaning")


def headline(found: HostCalibration) -> list[str]:
    """Return sentences on what was measured, when, and how accurate predictions are."""
    return [
        f"Calibration of {found.name}: {found.machine.cpu}, {found.machine.cores:g} cores, torch {found.machine.torch}",
        f"Measured at {found.measured_at} UTC"
        + (f" in {found.took_s:.0f} s, load by other programs {_load(found)}" if found.took_s else ""),
        *([_accuracy(found)] if found.num_runs else []),
        *([found.note] if found.note else []),
    ]


def _load(found: HostCalibration) -> str:
    return "unknown" if found.load_average is None else f"{found.load_average:.1f}"


def _accuracy(found: HostCalibration) -> str:
    low, high = found.quantiles["5"], found.quantiles["95"]
    runs = plural(found.num_runs, "run")
    if found.error is None:
        return f"{runs}, too few to estimate the error"
    return (
        f"{runs}; on runs left out of the fit, the median error is {found.error:.1%}, and 90% of step times were "
        f"{low:.2f} to {high:.2f} times the predicted ones"
    )


def cells(found: HostCalibration) -> list[tuple[str, ...]]:
    """Return the cells of the table, one row for each constant."""
    rows: list[tuple[str, ...]] = []
    for row in found.constants:
        value, low, high = amounts_text(row.name, row.value, row.low, row.high)
        unit = high.rpartition(" ")[2]
        rows.append(
            (row.name, scope(row), f"{value} {unit}", f"{low} to {high}", CONSTANTS[row.name].meaning)
        )
    return rows


def scope(row: Constant) -> str:
    """Return the scope of a constant, such as ``shm, 4 ranks`` or ``node 0 to 1``; empty if it holds in general."""
    parts: list[str] = [row.transport or ""]
    if row.ranks is not None:
        parts.append(plural(row.ranks, "rank"))
    if row.nodes is not None:
        parts.append(f"node {row.nodes[0]} to {row.nodes[1]}")
    return ", ".join(filter(None, parts))


def shown(found: HostCalibration) -> list[Part]:
    """Return the headline and the table of constants of a calibration."""
    return [Sentences(headline(found)), Table(HEADER, cells(found), num_left=len(HEADER))]


def frame_of(rows: Sequence[Constant]) -> pd.DataFrame:
    """Return a data frame with one row for each constant; a column that no constant has is left out."""
    import pandas as pd

    columns = [{**row.model_dump(), "unit": CONSTANTS[row.name].unit} for row in rows]
    order = ["name", "transport", "ranks", "nodes", "value", "low", "high", "unit"]
    return pd.DataFrame(columns)[order].dropna(axis="columns", how="all")
