"""Fit the effects of `spec.effects` to all tables, and score each table by effects fitted without it.

    cd tests; python -m published.hierarchy REFERENCE ../toolkit/shardscope/spec/catalogue/effects/fitted.json

REFERENCE is a folder with the files of measured tables. It takes two minutes. The standard deviations of the effects
were chosen by the scores of left-out tables. So that large tables do not dominate, a table counts for at most
`TABLE_WEIGHT` rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from published import more, small
from published.datasets import load
from shardscope.measure.calibrate.of_rows import NOISE
from shardscope.measure.scoreboard.one_step import after_one
from shardscope.measure.scoreboard.rows import Row, predicted_seconds
from shardscope.measure.scoreboard.score import constant_mfu_seconds, plain_seconds
from shardscope.measure.scoreboard.tables import published
from shardscope.prediction.spread import moved, slopes
from shardscope.spec.calibration import FACTORS, Calibration
from shardscope.spec.cluster import Device
from shardscope.spec.effects import OTHER, architecture, effects_of, usual
from shardscope.spec.software import SOFTWARE

Floats = npt.NDArray[np.float64]
NAMES = tuple(FACTORS)
SPREAD = np.array(list(FACTORS.values()))
SDS = {"all": 1.0, "family": 0.8, "software": 0.5, "trend": 0.8, "device": 0.4, "table": 0.6}
"""Standard deviation of each kind of effect, relative to `FACTORS`."""
SCALE_SD = 0.05
"""That of the common scale, for effects other than a table's."""
MOST_ROWS, TABLE_WEIGHT = 24, 12.0
TURNS = 14
ROBUST = 2 * NOISE
"""Residuals beyond this count linearly."""


class Linear(NamedTuple):
    """log(measured / predicted) of a table's rows, and its slopes, around some values of the factors."""

    at: Floats
    off: Floats
    slope: Floats

    def left(self, u: Floats) -> Floats:
        return self.off - self.slope @ (u - self.at)


class Table(NamedTuple):
    """A table's rows, and the effects that its constants have."""

    name: str
    rows: list[Row]
    effects: dict[str, float]
    base: Calibration
    weight: float

    def linear(self, at: Floats) -> Linear:
        log, slope = slopes(lambda one: predicted_seconds(self.rows, one), self.base, at)
        return Linear(at, np.log([row.seconds for row in self.rows]) - log, slope)

    def off(self, at: Floats) -> Floats:
        """log(measured / predicted) of each row."""
        predicted = predicted_seconds(self.rows, moved(self.base, at))
        return np.log([row.seconds for row in self.rows]) - np.log(predicted)

    @property
    def all_effects(self) -> dict[str, float]:
        return {**self.effects, f"table {self.name}": 1.0}


def table(name: str, rows: Sequence[Row]) -> Table:
    """A table with at most `MOST_ROWS` of its rows, drawn at random."""
    order = np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS]
    some = [rows[place] for place in sorted(order)]
    device = some[0].cluster.device
    effects = effects_of(SOFTWARE[some[0].software], device)
    return Table(name, some, effects, usual(device), min(1.0, TABLE_WEIGHT / len(some)))


def tables_of(folder: Path) -> list[Table]:
    """All tables, one for each software and type of device."""
    blocks = json.loads((folder / "published.json").read_text("utf-8"))
    found = load(folder / "published.json")
    foundry = found.pop("llm_foundry_benchmarks")
    for chip in ("a100", "h100"):
        found[f"LLM Foundry, {chip}"] = [row for row in foundry if row.cluster.device.name.startswith(chip)]
    found |= more.rows(json.loads((folder / "more_points.json").read_text("utf-8"))["rows"])
    found["Sailor, GH200"] = small.sailor(blocks["sailor_validation"], "Sailor, GH200")
    found["Mist, L4"] = small.mist(blocks["mist_l4"], "Mist, L4")
    return [table(name, rows) for name, rows in (found | published()).items()]


def sd_of(effect: str) -> Floats:
    """Standard deviation of an effect on each constant."""
    kind = effect.split(maxsplit=1)[0]
    sd = SPREAD * SDS[kind]
    return sd if kind == "table" else np.where(np.array(NAMES) == "scale", SCALE_SD, sd)


class Found(NamedTuple):
    """Estimated effects, and their covariance in the order of `order`."""

    values: dict[str, Floats]
    covariance: Floats
    order: list[str]

    def mean(self, effects: Mapping[str, float]) -> Floats:
        zero = np.zeros(len(NAMES))
        return sum((factor * self.values.get(e, zero) for e, factor in effects.items()), zero)

    def spread(self, effects: Mapping[str, float]) -> Floats:
        """Standard deviations of the constants of a new table with these effects."""
        size, total = len(NAMES), sd_of("table") ** 2
        for one, factor in effects.items():
            if one not in self.order:
                total = total + (factor * sd_of(one)) ** 2
        known = [(self.order.index(e) * size, factor) for e, factor in effects.items() if e in self.order]
        for i, one in known:
            for j, other in known:
                total = total + one * other * np.diag(self.covariance[i : i + size, j : j + size])
        return np.sqrt(total)


def solve(tables: Sequence[Table]) -> Found:
    """The most likely effects: Gauss-Newton steps, each as far as the loss decreases."""
    order = sorted({e for t in tables for e in t.all_effects})
    x, before = {e: np.zeros(len(NAMES)) for e in order}, np.inf
    for _ in range(TURNS):
        known = {t.name: t.linear(total(x, t.all_effects)) for t in tables}
        found = linear_fit(tables, known, x)
        at = {size: between(x, found.values, size) for size in (1.0, 0.5, 0.25, 0.1, 0.03)}
        losses = {size: loss(tables, values) for size, values in at.items()}
        best = min(losses, key=lambda size: losses[size])
        print(f"loss {losses[best]:.1f} with a step of {best:g}", flush=True)
        x = at[best]
        if losses[best] > 0.997 * before:
            break
        before = losses[best]
    return linear_fit(
        tables, {t.name: t.linear(total(x, t.all_effects)) for t in tables}, x, turns=1
    )._replace(values=x)


def total(x: Mapping[str, Floats], effects: Mapping[str, float]) -> Floats:
    """The factors of a table with these effects."""
    return sum((factor * x[e] for e, factor in effects.items()), np.zeros(len(NAMES)))


def between(x: Mapping[str, Floats], new: Mapping[str, Floats], size: float) -> dict[str, Floats]:
    return {e: x[e] + size * np.clip(new[e] - x[e], -0.7, 0.7) for e in x}


def loss(tables: Sequence[Table], x: Mapping[str, Floats]) -> float:
    """The loss of exact predictions: residuals count linearly beyond `ROBUST`, effects as the normal prior says."""
    fit = sum(
        t.weight * (8 * (np.sqrt(1 + (t.off(total(x, t.all_effects)) / ROBUST) ** 2) - 1)).sum()
        for t in tables
    )
    return float(fit + sum(((x[e] / sd_of(e)) ** 2).sum() for e in x))


def linear_fit(
    tables: Sequence[Table], known: Mapping[str, Linear], start: Mapping[str, Floats], turns: int = 5
) -> Found:
    """The most likely effects if residuals are linear in the factors; `turns` reweight the rows."""
    order = sorted({e for t in tables for e in t.all_effects})
    size, x = len(NAMES), {e: start[e] for e in order}
    for _ in range(turns):
        normal = np.diag(np.concatenate([sd_of(e) ** -2.0 for e in order]))
        right = np.zeros(len(normal))
        for t in tables:
            u, lin = total(x, t.all_effects), known[t.name]
            off = lin.left(u)
            weight = t.weight / NOISE**2 / np.sqrt(1 + (off / ROBUST) ** 2)
            block = (lin.slope.T * weight) @ lin.slope
            push = (lin.slope.T * weight) @ (off + lin.slope @ u)
            places = [(order.index(e) * size, factor) for e, factor in t.all_effects.items()]
            for i, one in places:
                right[i : i + size] += one * push
                for j, other in places:
                    normal[i : i + size, j : j + size] += one * other * block
        x = dict(zip(order, np.linalg.solve(normal, right).reshape(len(order), size), strict=True))
    return Found(x, np.linalg.inv(normal), order)


def score(t: Table, others: Sequence[Table], known: Mapping[str, Linear], whole: Found) -> dict[str, float]:
    """Scores of a table by effects fitted to the others, and of both trivial formulas with the others' constants."""
    found = linear_fit(others, known, whole.values)
    lin, spread = t.linear(found.mean(t.effects)), found.spread(t.effects)
    result = after_one(lin.slope, lin.off, np.diag(spread**2))
    baselines = {"plain": plain_seconds, "constant_mfu": constant_mfu_seconds}
    return {
        "rows": len(t.rows),
        "left_out": 100 * float(np.abs(np.expm1(-lin.off)).mean()),
        "after": result.after,
        "covered": result.covered,
        **{name: baseline(t, others, formula) for name, formula in baselines.items()},
    }


def baseline(t: Table, others: Sequence[Table], formula: object) -> float:
    """MAPE of a trivial formula whose constant is the median of the other tables' medians."""
    measured = np.array([row.seconds for row in t.rows])
    guess = formula(t.rows, {"": constant_of(others, formula)})
    return 100 * float(np.abs(guess / measured - 1).mean())


def constant_of(tables: Sequence[Table], formula: object) -> float:
    ratios = [formula(t.rows, {"": 1.0}) / np.array([row.seconds for row in t.rows]) for t in tables]
    return float(np.median([np.median(ratio) for ratio in ratios]))


def main(folder: Path, target: Path) -> None:
    """Fit, score and write all effects."""
    tables = tables_of(folder)
    whole = solve(tables)
    known = {t.name: t.linear(whole.mean(t.all_effects)) for t in tables}
    scores = {t.name: score(t, [o for o in tables if o.name != t.name], known, whole) for t in tables}
    shipped = {t.name: 100 * float(np.abs(np.expm1(-t.off(whole.mean(t.effects)))).mean()) for t in tables}
    for name, line in scores.items():
        print(
            f"{shipped[name]:5.1f}",
            name.ljust(36),
            " ".join(f"{key} {value:.1f}" for key, value in line.items()),
        )
    for key in ("left_out", "after", "covered", "plain", "constant_mfu"):
        values = [line[key] for line in scores.values()]
        print(
            key.ljust(14), f"median {np.median(values):.1f}, least {min(values):.1f}, most {max(values):.1f}"
        )
    blocks = json.loads(target.read_text("utf-8"))
    blocks |= {
        "effects": {e: named(whole.values[e]) for e in whole.order if not e.startswith("table ")},
        "spreads": spreads(whole),
        "trend_spread": named(np.sqrt(np.diag(block(whole, "trend")))),
        "quantiles": {"5": float(np.exp(-1.645 * NOISE)), "50": 1.0, "95": float(np.exp(1.645 * NOISE))},
        "measured": [list(pair) for pair in dict.fromkeys(pair_of(t) for t in tables)],
        "constant_mfu": {"all tables": constant_of(tables, constant_mfu_seconds)},
        "constant_rate": {"all tables": constant_of(tables, plain_seconds)},
        "fitted": sorted({row.key for t in tables for row in t.rows}),
        "tables": {name: {k: round(v, 2) for k, v in line.items()} for name, line in scores.items()},
    }
    target.write_text(json.dumps(blocks, indent=1) + "\n", "utf-8")


def pair_of(t: Table) -> tuple[str, str]:
    return t.rows[0].software, architecture(t.rows[0].cluster.device.name)


def block(found: Found, effect: str) -> Floats:
    start = found.order.index(effect) * len(NAMES)
    return found.covariance[start : start + len(NAMES), start : start + len(NAMES)]


CHIPS = {"a100": "a100-80gb", "h100": "h100-80gb", "b200": "b200", "l4": "l4"}


def spreads(found: Found) -> dict[str, dict[str, dict[str, float]]]:
    """Standard deviations of the constants by software and architecture; for others, without those of the trend."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for software in SOFTWARE.values():
        mine = {chip: effects_of(software, Device.of(name)) for chip, name in CHIPS.items()}
        mine[OTHER] = {**mine["a100"], f"device {OTHER}": 1.0, "trend": 0.0}
        mine[OTHER].pop("device a100")
        result[software.name] = {chip: named(found.spread(effects)) for chip, effects in mine.items()}
    return result


def named(values: Floats) -> dict[str, float]:
    return {name: round(float(value), 4) for name, value in zip(NAMES, values, strict=True)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
