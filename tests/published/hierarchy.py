"""Fit the effects of `spec.effects` to all tables, and score each table by effects fitted without it.

    cd tests; python -m published.hierarchy REFERENCE ../toolkit/shardscope/spec/catalogue/effects/fitted.json

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
from published.left_out import Widths, best_widths, constant_of, left_out, print_scores, scores, trials
from shardscope.measure.scoreboard.score import constant_mfu_seconds, plain_seconds
from shardscope.spec.cluster import Device
from shardscope.spec.effects import OTHER, architecture, effects_of
from shardscope.spec.software import SOFTWARE

Floats = npt.NDArray[np.float64]
TURNS = 40
"""Most turns of a fit; it stops before."""
ENOUGH_LOSS, ENOUGH_X = 0.01, 0.01
"""It stops when a turn decreases the loss, and moves the logarithms of standard deviations, by less."""
LENGTHS = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Lengths of steps that are tried, as standard deviations of factors."""
_FLOOR = 1e-9


class Fit(NamedTuple):
    """Effects that fit tables best."""

    found: Found
    at: list[Floats]
    """Values of each table's factors, around which it was linearised."""
    x: Floats
    """Standard deviations, as `Spreads.of` takes them."""


def solve(
    tables: Sequence[Table], at: Sequence[Floats] | None = None, x: Floats | None = None, turns: int = TURNS
) -> Fit:
    """The most likely effects, by Levenberg and Marquardt's steps; each turn estimates their standard deviations."""
    u = [np.zeros(len(NAMES)) for _ in tables] if at is None else list(at)
    x = usual_spreads() if x is None else x
    effects = [t.effects for t in tables]
    for turn in range(turns + 1):
        seen = Seen.of(
            effects, [t.linear(each) for t, each in zip(tables, u, strict=True)], u, Spreads.of(x).noise
        )
        before, x = x, estimated(seen, x)
        found = Found.of(seen, Spreads.of(x))
        if turn == turns:
            break
        tried = [u, *(_next(found, effects, u, length) for length in LENGTHS)]
        losses = [loss(tables, values, found.spreads) for values in tried]
        best, moved = int(np.argmin(losses)), np.abs(x - before).max()
        u, decrease = tried[best], losses[0] - losses[best]
        if turns == TURNS:
            length = [0.0, *LENGTHS][best]
            print(
                f"turn {turn}: loss {losses[best]:.2f}, less by {decrease:.3f} with {length:g}; {moved:.3f}",
                flush=True,
            )
        if decrease < ENOUGH_LOSS and moved < ENOUGH_X:
            break
    return Fit(found, u, x)


def _next(found: Found, effects: Sequence[Effects], u: Sequence[Floats], length: float) -> list[Floats]:
    """Factors after a step that is as if each had also been measured, with this standard deviation, where it is."""
    near = Found.of(found.seen.held(u, found.spreads.noise, length), found.spreads)
    return [near.mean(each) for each in effects]


def loss(tables: Sequence[Table], u: Sequence[Floats], spreads: Spreads) -> float:
    """The loss of exact predictions: residuals count linearly beyond `ROBUST`, factors as the normal prior says."""
    effects = [t.effects for t in tables]
    noises = [spreads.noise[noise_index(each)] for each in effects]
    off = np.concatenate([t.off(each) / noise for t, each, noise in zip(tables, u, noises, strict=True)])
    fit = 2 * ROBUST**2 * (np.sqrt(1 + (off / ROBUST) ** 2) - 1).sum()
    factors = between(spreads, shared(effects, effects))
    values = np.array(u).T
    return float(
        fit
        + sum(
            v @ np.linalg.solve(c + _FLOOR * np.eye(len(v)), v) for v, c in zip(values, factors, strict=True)
        )
    )


def main(folder: Path, target: Path) -> None:
    """Fit, score and write all effects; the fit starts at 0, so it does not depend on those that the file has."""
    tables = all_tables(folder)
    whole = solve(tables)
    print_spreads(whole.found.spreads)
    each = [left_out(place, tables, whole.found, whole.x) for place in range(len(tables))]
    found = scores(tables, each)
    print_scores(found)
    write(target, tables, whole, best_widths(trials(each)), found)


def print_spreads(spreads: Spreads) -> None:
    """Print the standard deviations of all kinds of effects."""
    print("noise", {name: round(float(sd), 4) for name, sd in zip(NOISES, spreads.noise, strict=True)})
    print(*KINDS)
    for name, values in zip(NAMES, spreads.effects.T, strict=True):
        print(name.ljust(24), " ".join(f"{value:.3f}" for value in values))


def write(
    target: Path,
    tables: Sequence[Table],
    whole: Fit,
    widths: Widths,
    scores: dict[str, dict[str, float]],
) -> None:
    """Write what `spec.effects` reads; the names of devices and the usual constants stay as they are."""
    found, (wider, noisier) = whole.found, widths
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
