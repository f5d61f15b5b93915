"""Choices by predicted times, and two trivial formulas of step times as baselines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.compute.flops import hardware_flops, model_flops
from shardscope.analytic.recomputation import recomputed_in_model
from shardscope.measure.calibrate.rows import Row
from shardscope.prediction.step.machine import FORMATS

Floats = npt.NDArray[np.float64]


NEAR = 0.03
"""Largest loss of a choice that counts as good, relative to the fastest measured layout."""


class Ranking(NamedTuple):
    """Choices among layouts of one model and batch on the same number of devices."""

    groups: int
    """Number of groups with at least two layouts."""
    near: int
    """Number of groups in which the layout that is predicted to be fastest is within `NEAR` of the fastest measured."""
    worst: float
    """Largest loss, in per cent; NaN without groups."""

    @classmethod
    def of(cls, rows: Sequence[Row], predicted: Floats) -> Ranking:
        """Return the ranking of rows by their predicted times in seconds, in the same order."""
        found = losses(rows, predicted)
        return cls(len(found), sum(loss <= NEAR for loss in found), 100 * max(found, default=float("nan")))


def losses(rows: Sequence[Row], predicted: Floats) -> list[float]:
    """Return, by group, how much longer the step of the chosen layout is than that of the best, as a fraction.

    A group has rows of one model, software and precision, with one batch and number of devices, whose layouts differ.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        layout = row.layout
        key = (
            layout.num_devices,
            layout.global_batch,
            layout.precision,
            row.software,
            row.cluster.device.name,
        )
        groups[f"{row.model!r} {key}"].append(place)
    found = []
    for places in groups.values():
        if len({repr(rows[place].layout) for place in places}) > 1:
            seconds = np.array([rows[place].seconds for place in places])
            chosen = seconds[int(np.argmin(predicted[places]))]
            found.append(float(chosen / seconds.min() - 1))
    return found


def constant_mfu_seconds(rows: Sequence[Row], constants: Mapping[str, float]) -> Floats:
    """Return step times by the simplest formula, in seconds.

    The model's FLOPs are divided by a fraction of the peak FLOP/s that is constant per data set and precision.
    """
    return np.array([_needed(row) / (_peak(row) * _constant(row, constants)) for row in rows])


def plain_seconds(rows: Sequence[Row], constants: Mapping[str, float]) -> Floats:
    """Return step times by the plain formula, in seconds.

    FLOPs with recomputation are divided by a constant fraction of the peak FLOP/s. The result is multiplied by
    1 + (p - 1) / m for the pipeline bubble, with p stages and m micro-batches.
    """
    return np.array([_plain(row) / _constant(row, constants) for row in rows])


def kind_of(row: Row) -> str:
    """Return the data set and precision of a row; both formulas have one constant for each such pair."""
    return f"{row.dataset}, {row.layout.precision}"


def _constant(row: Row, constants: Mapping[str, float]) -> float:
    """Return the constant for the row's data set and precision, or the first constant if these were not fitted."""
    return constants.get(kind_of(row)) or next(iter(constants.values()))


def _needed(row: Row) -> float:
    return float(model_flops(row.model, row.layout.global_batch))


def _plain(row: Row) -> float:
    layout = row.layout
    layers = recomputed_in_model(layout, row.model.layers)
    done = float(hardware_flops(row.model, layout.global_batch, recompute=layout.recompute, layers=layers))
    return done * (1 + (layout.pipeline - 1) / layout.num_micro_batches) / _peak(row)


def _peak(row: Row) -> float:
    peaks = row.cluster.device.peak_flops
    return (
        peaks[next(name for name in FORMATS[row.layout.precision] if name in peaks)] * row.layout.num_devices
    )


def megatron_flops(
    batch: npt.ArrayLike,
    seq: npt.ArrayLike,
    layers: npt.ArrayLike,
    hidden: npt.ArrayLike,
    vocab: npt.ArrayLike,
) -> Floats:
    """Return the FLOPs of a step with full recomputation: F = 96 B s l h² (1 + s/(6h) + V/(16 l h)).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), equation 3.

    Args:
        batch: B, number of sequences in the global batch.
        seq: s, tokens per sequence.
        layers: l, number of transformer layers.
        hidden: h, hidden size.
        vocab: V, vocabulary size.
    """
    b, s, l, h, v = (np.asarray(each, float) for each in (batch, seq, layers, hidden, vocab))  # noqa: E741
    return np.asarray(96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h)))
