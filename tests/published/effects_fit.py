"""Effects of software and devices, and their standard deviations, estimated from linearised tables.

The constants of a table are the sums of its effects: u = Σ x_e, with x_e normal around 0. So the residuals of two
tables are correlated by the effects that both have, and residuals of all tables are one Gaussian process. The standard
deviations of all kinds of effects and of a row's own deviation are those that make the residuals most likely (type-II
maximum likelihood; Rasmussen and Williams 2006, chapter 5), with wide log-normal priors. Rows deviate more with some
software than with other: a vendor's tuned recipes less than runs of a research cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from shardscope.calibration.calibration import FACTORS
from shardscope.calibration.software import SOFTWARE

Floats = npt.NDArray[np.float64]
Effects = Mapping[str, float]
NAMES = tuple(FACTORS)
KINDS = {"all": 1.0, "family": 0.8, "software": 0.5, "trend": 0.8, "device": 0.4, "pair": 0.0, "table": 0.6}
"""Kinds of effects, with the centre of the prior of their standard deviations relative to `USUAL`. A pair of software
and device has an effect on the scale alone."""
USUAL = {**FACTORS, "scale": 1.0}  # see SCALES for the scale
"""How much each constant may differ between machines, as a standard deviation of its logarithm: the prior's centre."""
LAUNCHES = {
    "all": 2.0, "family": 0.1, "software": 0.1, "trend": 0.3, "device": 0.1, "pair": 0.0, "table": 0.1,
}  # fmt: skip
"""The same for the time to launch a kernel, by kind. Python takes most of it, on hosts that differ less than clusters
do, so all tables have nearly the same value, whatever it is; but newer devices have newer hosts, so their trend is
wider. Few tables determine it, so one with a slow host must not widen these. They rest on that argument, as does their
entry in `FREEDOM`; with a trend of 0.1, an earlier fit had a 0.2 to 0.3 % larger median error of left-out tables."""
SCALES = {
    "all": 0.08, "family": 0.06, "software": 0.04, "trend": 0.06, "device": 0.03, "pair": 0.1, "table": 0.08,
}  # fmt: skip
"""The same for the common scale of all times, by kind. The likelihood hardly depends on that of tables between 0 and
0.1; the errors of left-out tables after one measured step were least from 0.08 to 0.12, in an earlier fit."""
USUAL_NOISE, LEAST_NOISE = 0.05, 0.035
"""Deviation of rows: usual, and at least. The layouts of one vendor are more alike than those that users compare."""
NOISES = tuple(name for name, each in SOFTWARE.items() if each.measured_as == name)
"""Software whose rows have a standard deviation of their own."""
FREEDOM = {"kind": 0.5, "factor": 0.4, "scale": 0.2, "noise": 0.3, "software": 0.4, "launch_s": 0.1}
"""Standard deviations, in logarithms, of the priors of standard deviations."""
ROBUST = 2.0
"""Residuals beyond this many standard deviations count linearly."""


class Spreads(NamedTuple):
    """Standard deviations of effects on the factors, by kind, shape `(kinds, factors)`, and of a row's deviation."""

    effects: Floats
    noise: Floats
    """Of rows of each software, in the order of `NOISES`."""

    @classmethod
    def of(cls, x: Floats) -> Spreads:
        """The standard deviations at x, the logarithms of their ratios to the priors' centres."""
        kinds, factors, scales, noise, software = np.split(x, _ENDS)
        sd = np.outer(np.array(list(KINDS.values())), np.array(list(USUAL.values())))
        sd[:, 1:] *= np.exp(kinds)[:, None] * np.exp(factors)
        sd[:, _LAUNCH] = np.array(list(LAUNCHES.values())) * np.exp(factors[_LAUNCH - 1])
        sd[:, 0] = np.array(list(SCALES.values())) * np.exp(scales)
        return cls(sd, np.hypot(LEAST_NOISE, USUAL_NOISE * np.exp(noise + software)))


_LAUNCH = NAMES.index("launch_s")
_SIZES = (len(KINDS), len(NAMES) - 1, len(KINDS), 1, len(NOISES))
_ENDS = np.cumsum(_SIZES)[:-1]


def usual_spreads() -> Floats:
    """The centre of the prior of `Spreads.of`."""
    return np.zeros(sum(_SIZES))


def _prior() -> Floats:
    found = np.repeat([FREEDOM[name] for name in ("kind", "factor", "scale", "noise", "software")], _SIZES)
    found[len(KINDS) + _LAUNCH - 1] = FREEDOM["launch_s"]
    return found


class Seen(NamedTuple):
    """Rows of all tables: a target, which is `slope` times the table's factors plus the row's own deviation."""

    effects: tuple[Effects, ...]
    """Effects of each table."""
    table: npt.NDArray[np.intp]
    """The table of each row."""
    software: npt.NDArray[np.intp]
    """The software of each row, as an index into `NOISES`."""
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
        noise: Floats,
    ) -> Seen:
        """Rows of tables that were linearised around some values of their factors."""
        off = np.concatenate([off for off, _ in linear])
        target = np.concatenate([off + slope @ u for (off, slope), u in zip(linear, at, strict=True)])
        table = np.repeat(np.arange(len(linear)), [len(off) for off, _ in linear])
        software = np.array([noise_index(each) for each in effects])[table]
        weight = 1 / np.sqrt(1 + (off / (ROBUST * noise[software])) ** 2)
        slopes = np.concatenate([slope for _, slope in linear])
        return cls(tuple(effects), table, software, slopes, target, weight)

    def without(self, table: int) -> Seen:
        """The rows of all other tables."""
        kept = self.table != table
        rest = tuple(each for place, each in enumerate(self.effects) if place != table)
        place = self.table[kept] - (self.table[kept] > table)
        rows = (each[kept] for each in (self.software, self.slope, self.target, self.weight))
        return Seen(rest, place, *rows)

    def held(self, at: Sequence[Floats], noise: Floats, lengths: Floats) -> Seen:
        """These rows, and one for each factor that says where it is, with a standard deviation for each table."""
        of_tables = np.array([noise_index(each) for each in self.effects])
        table = np.repeat(np.arange(len(at)), len(NAMES))
        software = of_tables[table]
        return Seen(
            self.effects,
            np.concatenate([self.table, table]),
            np.concatenate([self.software, software]),
            np.concatenate([self.slope, np.tile(np.eye(len(NAMES)), (len(at), 1))]),
            np.concatenate([self.target, *at]),
            np.concatenate([self.weight, (noise[software] / lengths[table]) ** 2]),
        )


def noise_index(effects: Effects) -> int:
    """Index into `NOISES` of the software that a table's effects name."""
    return next(place for place, name in enumerate(NOISES) if f"software {name}" in effects)


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
    return found + np.diag(spreads.noise[seen.software] ** 2 / seen.weight)


def estimated(seen: Seen, start: Floats) -> Floats:
    """The standard deviations that make the rows most likely, as `Spreads.of` takes them."""
    common = shared(seen.effects, seen.effects)
    hot = np.eye(len(seen.effects))[seen.table]
    by_software = np.eye(len(NOISES))[seen.software]

    def loss(x: Floats) -> tuple[float, Floats]:
        spreads = Spreads.of(x)
        factor = cho_factor(covariance(seen, spreads, common), lower=True)
        alpha = cho_solve(factor, seen.target)
        value = 0.5 * seen.target @ alpha + np.log(np.diag(factor[0])).sum()
        more = np.outer(alpha, alpha) - cho_solve(factor, np.eye(len(alpha)))
        by_table = np.stack([(hot * g[:, None]).T @ more @ (hot * g[:, None]) for g in seen.slope.T])
        each = -np.einsum("kab,fab->kf", common, by_table) * spreads.effects**2
        own = spreads.noise[seen.software] ** 2 - LEAST_NOISE**2
        noise = -(np.diag(more) * own / seen.weight) @ by_software
        of_kinds = np.delete(each, [0, _LAUNCH], axis=1).sum(1)
        slope = np.concatenate([of_kinds, each[:, 1:].sum(0), each[:, 0], [noise.sum()], noise])
        return value + 0.5 * ((x / _prior()) ** 2).sum(), slope + x / _prior() ** 2

    return np.asarray(
        minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-10}).x
    )


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
