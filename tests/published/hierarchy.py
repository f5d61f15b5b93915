"""Fit the effects of `calibration.effects` to all tables, and score each table by effects fitted without it.

    cd tests; python -m published.hierarchy REFERENCE ../toolkit/shardscope/calibration/catalogue/effects/fitted.json

REFERENCE is a folder with the files of measured tables. A table that is left out has no part in the effects that
predict it, nor in their standard deviations. What it had a part in is the form of the formulas, the priors of
`effects_fit`, and the values around which the other tables are linearised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from published.all_tables import Table, all_tables
from published.effects_fit import (
    KINDS,
    NAMES,
    NOISES,
    ROBUST,
    Effects,
    Found,
    Seen,
    Spreads,
    between,
    estimated,
    noise_index,
    shared,
    usual_spreads,
)
from published.formulas import constant_mfu_seconds, plain_seconds
from published.left_out import Widths, best_widths, constant_of, left_out, print_scores, scores, trials
from shardscope.calibration.effects import OTHER, architecture, effects_of
from shardscope.calibration.software import SOFTWARE
from shardscope.spec.cluster import Device

Floats = npt.NDArray[np.float64]
TURNS, SETTLED = 40, 15
"""Most turns of a fit, and after how many of them the standard deviations stay as they are, so that it converges."""
ENOUGH = 0.1
"""A fit has converged when two turns in a row decrease its loss by less."""
LONGEST = 1.0
"""Longest standard deviation by which a turn holds a table's factors near where they are."""
SHARES = (1.0, 0.3, 0.1)
"""Shares of these standard deviations that each turn tries."""
_FLOOR = 1e-9


def solve(tables: Sequence[Table], at: Sequence[Floats] | None = None) -> tuple[Found, Floats]:
    """The most likely effects, by Levenberg and Marquardt's steps, each table's as long as its formulas are linear.

    Args:
        tables: The tables to fit.
        at: Each table's factors at the start; None for 0.

    Returns:
        What the tables say, and the standard deviations of effects, as `Spreads.of` takes them.
    """
    u, x = [np.zeros(len(NAMES)) for _ in tables] if at is None else list(at), usual_spreads()
    effects, lengths, small = [t.effects for t in tables], np.full(len(tables), LONGEST), 0
    for turn in range(TURNS):
        linear = [t.linear(each) for t, each in zip(tables, u, strict=True)]
        seen = Seen.of(effects, linear, u, Spreads.of(x).noise)
        x = estimated(seen, x) if turn < SETTLED else x
        found = Found.of(seen, Spreads.of(x))
        if small == 2:
            break
        before = Loss.of(tables, u, found.spreads)
        tried = [before, *(before.at(tables, _next(found, effects, u, share * lengths)) for share in SHARES)]
        chosen = mixed(tried)
        u = [np.array(tried[one].u[place]) for place, one in enumerate(chosen)]
        lengths = np.minimum(lengths * np.array([0.2, 2.0, 0.5, 0.2])[chosen], LONGEST)
        now, then = before.at(tables, u).total, before.total
        print(f"turn {turn}: loss {now:.2f}, before {then:.2f}", np.bincount(chosen), flush=True)
        small = small + 1 if then - now < ENOUGH else 0
    return found, x


def _next(found: Found, effects: Sequence[Effects], u: Sequence[Floats], lengths: Floats) -> list[Floats]:
    """Factors after a step that is as if each had also been measured, with these standard deviations, where it is."""
    near = Found.of(found.seen.held(u, found.spreads.noise, lengths), found.spreads)
    return [near.mean(each) for each in effects]


class Loss(NamedTuple):
    """The loss of exact predictions: residuals count linearly beyond `ROBUST`, factors as the normal prior says."""

    u: Floats
    """Factors of all tables, shape `(tables, factors)`."""
    noises: Floats
    """Standard deviation of each table's rows."""
    precisions: Floats
    """Inverse covariances of the factors of tables, shape `(factors, tables, tables)`."""
    fits: Floats
    """Loss of each table's residuals."""

    @classmethod
    def of(cls, tables: Sequence[Table], u: Sequence[Floats], spreads: Spreads) -> Loss:
        """The loss with these standard deviations."""
        effects = [t.effects for t in tables]
        factors = between(spreads, shared(effects, effects))
        noises = spreads.noise[[noise_index(each) for each in effects]]
        empty = cls(np.zeros(0), noises, np.linalg.inv(factors + _FLOOR * np.eye(len(tables))), np.zeros(0))
        return empty.at(tables, u)

    def at(self, tables: Sequence[Table], u: Sequence[Floats]) -> Loss:
        """The loss with other factors."""
        off = [t.off(each) / noise for t, each, noise in zip(tables, u, self.noises, strict=True)]
        fits = [2 * ROBUST**2 * (np.sqrt(1 + (each / ROBUST) ** 2) - 1).sum() for each in off]
        return self._replace(u=np.array(u), fits=np.array(fits))

    @property
    def total(self) -> float:
        return float(self.fits.sum() + np.einsum("af,fab,bf->", self.u, self.precisions, self.u))


def mixed(tried: Sequence[Loss]) -> npt.NDArray[np.intp]:
    """Which of some factors each table should have: those that decrease the loss, one table after the other."""
    tables, precisions = range(len(tried[0].u)), tried[0].precisions
    chosen = np.full(len(tables), np.argmin([each.total for each in tried]))
    values, fits = np.array([each.u for each in tried]), np.array([each.fits for each in tried])
    before = None
    while before is None or np.any(before != chosen):
        before = chosen.copy()
        for t in tables:
            u = values[chosen, tables]
            moved = values[:, t] - u[t]
            pull = 2 * np.einsum("fb,bf->f", precisions[:, t], u)
            changes = fits[:, t] + moved @ pull + moved**2 @ precisions[:, t, t]
            chosen[t] = np.argmin(changes)
    return chosen


def main(folder: Path, target: Path) -> None:
    """Fit, score and write all effects; the fit starts at 0, so it does not depend on those that the file has."""
    tables = all_tables(folder)
    fitted = [t for t in tables if t.is_fitted]
    found, x = solve(fitted)
    print_spreads(found.spreads)
    each = [left_out(t, fitted.index(t) if t.is_fitted else None, found, x) for t in tables]
    scored = scores(each)
    print_scores(scored)
    write(target, fitted, found, best_widths(trials(each)), scored)


def print_spreads(spreads: Spreads) -> None:
    """Print the standard deviations of all kinds of effects."""
    print("noise", {name: round(float(sd), 4) for name, sd in zip(NOISES, spreads.noise, strict=True)})
    print(*KINDS)
    for name, values in zip(NAMES, spreads.effects.T, strict=True):
        print(name.ljust(24), " ".join(f"{value:.3f}" for value in values))


def write(
    target: Path,
    tables: Sequence[Table],
    found: Found,
    widths: Widths,
    scores: dict[str, dict[str, float]],
) -> None:
    """Write what `calibration.effects` reads; the names of devices and the usual constants stay as they are."""
    wider, noisier = widths
    noises = zip(NOISES, noisier * found.spreads.noise, strict=True)
    kept = {e for t in tables for e in t.shared}
    blocks = json.loads(target.read_text("utf-8"))
    blocks |= {
        "effects": {e: named(found.mean({e: 1.0})) for e in sorted(kept)},
        "covariances": covariances(found, wider),
        "noise": {name: round(float(noise), 4) for name, noise in noises},
        "noisier": noisier,
        "measured": [list(pair) for pair in dict.fromkeys(pair_of(t) for t in tables)],
        "constant_mfu": {"all tables": constant_of(tables, constant_mfu_seconds)},
        "constant_rate": {"all tables": constant_of(tables, plain_seconds)},
        "fitted": sorted({row.key for t in tables for row in t.rows}),
        "tables": {
            name: {k: v if k == "rows" else float(f"{v:.4g}") for k, v in line.items()}
            for name, line in scores.items()
        },
    }
    blocks.pop("quantiles", None)
    target.write_text(json_text(blocks), "utf-8")


def json_text(blocks: dict[str, object]) -> str:
    """The blocks as JSON, with a line for each entry of each block."""
    parts = []
    for name, block in blocks.items():
        if isinstance(block, dict):
            lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in block.items())
            parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(block)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def pair_of(t: Table) -> tuple[str, str]:
    return SOFTWARE[t.rows[0].software].measured_as, architecture(t.rows[0].cluster.device.name)


CHIPS = {"a100": "a100-80gb", "h100": "h100-80gb", "b200": "b200", "l4": "l4", "v100": "v100-32gb"}


def covariances(found: Found, wider: float) -> dict[str, list[float]]:
    """Covariances of the constants of a new cluster by software and architecture, as lower triangles.

    For other architectures, it is A + τ B + τ² C with the factor of the trend τ.
    """
    result: dict[str, list[float]] = {}
    for software in (SOFTWARE[name] for name in NOISES):
        for chip, name in CHIPS.items():
            effects = effects_of(software, Device.of(name))
            result[f"{software.name} {chip}"] = triangle(cluster_covariance(found, effects, wider))
        usual = effects_of(software, Device.of("a100-80gb"))
        usual = {name.replace(" a100", f" {OTHER}"): factor for name, factor in usual.items()}
        low, middle, high = (
            cluster_covariance(found, {**usual, "trend": trend}, wider) for trend in (-1.0, 0.0, 1.0)
        )
        for power, part in enumerate((middle, (high - low) / 2, (high + low) / 2 - middle)):
            result[f"{software.name} {OTHER} {power}"] = triangle(part)
    return result


def cluster_covariance(found: Found, effects: Effects, wider: float) -> Floats:
    """Covariance of the constants of a new cluster with these effects."""
    return wider * found.covariance({**effects, "table new": 1.0})


def triangle(matrix: Floats) -> list[float]:
    return [float(f"{value:.4g}") for value in matrix[np.tril_indices(len(matrix))]]


def named(values: Floats) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in zip(NAMES, values, strict=True)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
