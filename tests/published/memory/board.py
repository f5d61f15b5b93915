"""Scores of predicted memory: errors of peaks, and how often "fits" and "does not fit" were right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from published.memory.bigscience import bigscience
from published.memory.hagemann import hagemann
from published.memory.others import mist, simumax, torchtitan
from published.memory.replicas import replicas
from published.memory.rows import MemoryRow
from published.tables import published
from shardscope.measure.calibrate.rows import Row
from shardscope.spec.layout import Layout


class PeakLine(NamedTuple):
    """How well the published peaks of one table are predicted; errors in per cent."""

    dataset: str
    rows: str
    """``"fitted"`` if the memory model was changed to agree with these peaks, else ``"never fitted"``."""
    framework: str
    """The memory model, a key of `analytic.memory.FRAMEWORKS`."""
    counted: str
    """What the peaks count, as `MemoryRow.counted`."""
    runs: int
    mape: float
    """Mean of |predicted / measured - 1|."""
    worst: float
    """Largest |predicted / measured - 1|."""
    bias: float
    """Mean of predicted / measured - 1."""


class FitLine(NamedTuple):
    """How often "fits" was right in one table."""

    dataset: str
    ran: int
    """Number of runs that ran."""
    refused: int
    """Number of these that are said not to fit."""
    ran_out: int
    """Number of runs that ran out of memory."""
    foreseen: int
    """Number of these that are said not to fit."""


def memory_tables() -> dict[str, list[MemoryRow]]:
    """Return all rows of published memory, by table name."""
    tables: dict[str, list[MemoryRow]] = {}
    for row in [*simumax(), *torchtitan(), *mist(), *replicas(), *hagemann()]:
        tables.setdefault(row.dataset, []).append(row)
    return tables | bigscience()


def runs_that_ran(tables: Mapping[str, Sequence[Row]] | None = None) -> dict[str, list[MemoryRow]]:
    """Return the rows of tables of step times, which all ran; None for those that ship.

    Each layout of a model on a device counts once per memory model, so rows that repeat one, or one of `memory_tables`,
    are left out.
    Settings that tables of step times leave out are added as the sources state them: Megatron Bridge's FSDP on GB200
    offloaded activations (``cpu_offloading_num_layers``, half of the layers), and Llama 3 sharded gradients (section
    3.3.2).
    """
    seen = {row.run for rows in memory_tables().values() for row in rows}
    found: dict[str, list[MemoryRow]] = {}
    for name, rows in (published() if tables is None else tables).items():
        for row in rows:
            ran = MemoryRow(name, row.model, row.cluster, _stated(row), row.software)
            if ran.run not in seen:
                seen.add(ran.run)
                found.setdefault(name, []).append(ran)
    return found


def _stated(row: Row) -> Layout:
    if row.dataset == "Megatron Bridge, GB200" and row.layout.zero == 3:
        return row.layout.replace(offload="activations")
    return row.layout.replace(zero=2) if row.dataset == "Llama 3, table 4" else row.layout


def peak_lines(tables: Mapping[str, Sequence[MemoryRow]]) -> list[PeakLine]:
    """Return the errors of published peaks, one line per table that has any."""
    lines = []
    for name, rows in tables.items():
        known = [row for row in rows if row.gib is not None]
        if known:
            off = 100 * np.array([row.predicted_gib / (row.gib or 1.0) - 1 for row in known])
            size = np.abs(off)
            lines.append(
                PeakLine(
                    name, "fitted" if known[0].is_fitted else "never fitted", known[0].framework, known[0].counted,
                    len(known), float(size.mean()), float(size.max()), float(off.mean()),
                )
            )  # fmt: skip
    return lines


def fit_lines(tables: Mapping[str, Sequence[MemoryRow]]) -> list[FitLine]:
    """Return how often "fits" was right, one line per table."""
    lines = []
    for name, rows in tables.items():
        ran, ran_out = ([row for row in rows if row.fits is fits] for fits in (True, False))
        refused = sum(not row.predicted_to_fit for row in ran)
        foreseen = sum(not row.predicted_to_fit for row in ran_out)
        lines.append(FitLine(name, len(ran), refused, len(ran_out), foreseen))
    return lines


def total_fits(lines: Sequence[FitLine], name: str = "all tables") -> FitLine:
    """Return the sums over all tables."""
    return FitLine(name, *(sum(column) for column in zip(*(line[1:] for line in lines), strict=True)))


def without_largest(lines: Sequence[FitLine]) -> FitLine:
    """Return the sums over all tables but the one with the most out-of-memory errors, on which the total rests."""
    largest = max(lines, key=lambda line: line.ran_out)
    return total_fits([line for line in lines if line is not largest], f"without {largest.dataset}")
