"""Effects of software and devices, and their standard deviations, estimated from linearised tables.

The constants of a table are the sums of its effects: u = Σ x_e, with x_e normal around 0. So the residuals of two
tables are correlated by the effects that both have, and residuals of all tables are one Gaussian process. The standard
deviations of all kinds of effects and of a row's own deviation are those that make the residuals most likely (type-II
maximum likelihood; Rasmussen and Williams 2006, chapter 5), with wide log-normal priors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from shardscope.spec.calibration import FACTORS

Floats = npt.NDArray[np.float64]
Effects = Mapping[str, float]
NAMES = tuple(FACTORS)
KINDS = {"all": 1.0, "family": 0.8, "software": 0.5, "trend": 0.8, "device": 0.4, "table": 0.6}
"""Kinds of effects, with the centre of the prior of their standard deviations relative to `USUAL`."""
USUAL = {**FACTORS, "scale": 1.0}  # see SCALES for the scale
"""How much each constant may differ between machines, as a standard deviation of its logarithm: the prior's centre."""
SCALES = {"all": 0.08, "family": 0.06, "software": 0.04, "trend": 0.06, "device": 0.03, "table": 0.1}
"""The same for the common scale of all times, by kind. The likelihood hardly depends on that of tables between 0 and
0.1; the errors of left-out tables after one measured step are least from 0.08 to 0.12."""
USUAL_NOISE = 0.06
FREEDOM = {"kind": 0.5, "factor": 0.4, "scale": 0.2, "noise": 0.3}
"""Standard deviations, in logarithms, of the priors of standard deviations."""
ROBUST = 2.0
"""Residuals beyond this many standard deviations count linearly."""


class Spreads(NamedTuple):
    """Standard deviations of effects on the factors, by kind, shape `(kinds, factors)`, and of a row's deviation."""

    effects: Floats
    noise: float

    @classmethod
    def of(cls, x: Floats) -> Spreads:
        """The standard deviations at x, the logarithms of their ratios to the priors' centres."""
        kinds, factors, scales, noise = _parts(x)
        sd = np.outer(np.array(list(KINDS.values())) * np.exp(kinds), np.array(list(USUAL.values())))
        sd[:, 1:] *= np.exp(factors)
        sd[:, 0] = np.array(list(SCALES.values())) * np.exp(scales)
        return cls(sd, float(USUAL_NOISE * np.exp(noise)))


def _parts(x: Floats) -> tuple[Floats, Floats, Floats, float]:
    kinds, factors = len(KINDS), len(NAMES) - 1
    return x[:kinds], x[kinds : kinds + factors], x[kinds + factors : -1], float(x[-1])


def usual_spreads() -> Floats:
    """The centre of the prior of `Spreads.of`."""
    return np.zeros(2 * len(KINDS) + len(NAMES))


def _prior() -> Floats:
    sds = [FREEDOM["kind"]] * len(KINDS) + [FREEDOM["factor"]] * (len(NAMES) - 1)
    return np.array([*sds, *[FREEDOM["scale"]] * len(KINDS), FREEDOM["noise"]])


class Seen(NamedTuple):
    """Rows of all tables: a target, which is `slope` times the table's factors plus the row's own deviation."""

    effects: tuple[Effects, ...]
    """Effects of each table."""
    table: npt.NDArray[np.intp]
    """The table of each row."""
    slope: Floats
    target: Floats
    weight: Floats
    """Weight of each row, less than 1 where its residual is large."""

    @classmethod
    def of(
        cls,
        effects: Sequence[Effects],
        linear: Sequence[tuple[Floats, Floats]],
        at: Sequence[Floats],
        noise: float,
    ) -> Seen:
        """Rows of tables that were linearised around some values of their factors."""
        off = np.concatenate([off for off, _ in linear])
        target = np.concatenate([off + slope @ u for (off, slope), u in zip(linear, at, strict=True)])
        table = np.repeat(np.arange(len(linear)), [len(off) for off, _ in linear])
        weight = 1 / np.sqrt(1 + (off / (ROBUST * noise)) ** 2)
        return cls(tuple(effects), table, np.concatenate([slope for _, slope in linear]), target, weight)

    def without(self, table: int) -> Seen:
        """The rows of all other tables."""
        kept = self.table != table
        rest = tuple(each for place, each in enumerate(self.effects) if place != table)
        place = self.table[kept] - (self.table[kept] > table)
        return Seen(rest, place, self.slope[kept], self.target[kept], self.weight[kept])


def shared(left: Sequence[Effects], right: Sequence[Effects]) -> Floats:
    """Products of the factors of common effects, by kind, table and table."""
    found = np.zeros((len(KINDS), len(left), len(right)))
    for kind, name in enumerate(KINDS):
        mine = [{e: factor for e, factor in one.items() if e.split(maxsplit=1)[0] == name} for one in left]
        for row, one in enumerate(mine):
            for column, other in enumerate(right):
                found[kind, row, column] = sum(factor * other.get(e, 0.0) for e, factor in one.items())
    return found


def between(spreads: Spreads, common: Floats) -> Floats:
    """Covariances of the factors of tables with common effects, shape `(factors, tables, tables)`."""
    return np.einsum("kf,kab->fab", spreads.effects**2, common)


def covariance(seen: Seen, spreads: Spreads, common: Floats) -> Floats:
    """Covariance of all rows' targets."""
    factors = between(spreads, common)[:, seen.table][:, :, seen.table]
    found = np.einsum("rf,frs,sf->rs", seen.slope, factors, seen.slope, optimize=True)
    return found + np.diag(spreads.noise**2 / seen.weight)


def estimated(seen: Seen, start: Floats) -> Floats:
    """The standard deviations that make the rows most likely, as `Spreads.of` takes them."""
    common = shared(seen.effects, seen.effects)
    hot = np.eye(len(seen.effects))[seen.table]

    def loss(x: Floats) -> tuple[float, Floats]:
        spreads = Spreads.of(x)
        factor = cho_factor(covariance(seen, spreads, common), lower=True)
        alpha = cho_solve(factor, seen.target)
        value = 0.5 * seen.target @ alpha + np.log(np.diag(factor[0])).sum()
        more = np.outer(alpha, alpha) - cho_solve(factor, np.eye(len(alpha)))
        by_table = np.stack([(hot * g[:, None]).T @ more @ (hot * g[:, None]) for g in seen.slope.T])
        each = -np.einsum("kab,fab->kf", common, by_table) * spreads.effects**2
        noise = -(np.diag(more) * spreads.noise**2 / seen.weight).sum()
        slope = np.concatenate([each[:, 1:].sum(1), each[:, 1:].sum(0), each[:, 0], [noise]])
        return value + 0.5 * ((x / _prior()) ** 2).sum(), slope + x / _prior() ** 2

    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 60}).x)


class Found(NamedTuple):
    """What the rows say about the factors of any table."""

    seen: Seen
    spreads: Spreads
    factor: tuple[Floats, bool]
    alpha: Floats

    @classmethod
    def of(cls, seen: Seen, spreads: Spreads) -> Found:
        """Condition on the rows."""
        factor = cho_factor(covariance(seen, spreads, shared(seen.effects, seen.effects)), lower=True)
        return cls(seen, spreads, factor, cho_solve(factor, seen.target))

    def mean(self, effects: Effects) -> Floats:
        """Expected factors of a table with these effects."""
        return self._with_rows(effects) @ self.alpha

    def covariance(self, effects: Effects) -> Floats:
        """Covariance of the factors of a table with these effects."""
        rows = self._with_rows(effects)
        before = np.diag(between(self.spreads, shared([effects], [effects]))[:, 0, 0])
        return before - rows @ cho_solve(self.factor, rows.T)

    def _with_rows(self, effects: Effects) -> Floats:
        """Covariance of the factors and all rows' targets."""
        factors = between(self.spreads, shared([effects], self.seen.effects))[:, 0]
        return factors[:, self.seen.table] * self.seen.slope.T
