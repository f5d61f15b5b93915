"""Formulas for the bubble of each pipeline schedule, as the maximum over a few critical paths.

A rank is idle if some chain of dependent operations takes longer than the rank's own work. For given numbers of ranks
and micro-batches, the length of a chain is a sum of durations of forwards, input gradients and weight gradients, so the
bubble is the maximum of a few such sums. The papers give only the sum that is largest if all durations are equal. The
other sums were derived from the schedules' tables, and the tests check all of them against these tables.

Every function here takes a `Case`: p ranks, m micro-batches, and the durations f of a forward, i of an input gradient
and w of a weight gradient, all for one micro-batch on one stage. It returns the bubble: the idle time of the rank that
is idle longest, between the rank's first and last operations. Functions whose names end in ``ramp`` return the minimum
idle time if ranks synchronise between steps.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Case(NamedTuple):
    """Numbers of ranks (p) and micro-batches (m), and durations of one stage's operations; arrays are broadcast."""

    p: Floats
    m: Floats
    f: Floats
    i: Floats
    w: Floats


def longest(first: Floats, *others: Floats) -> Floats:
    """Return the element-wise maximum of several arrays."""
    return np.asarray(reduce(np.maximum, others, first))


def flush(case: Case) -> Floats:
    """Return the bubble of GPipe, 1F1B and interleaved 1F1B: (p-1)(f+i+w).

    Huang et al. 2019, section 2.3; Narayanan et al. 2021 (SC), section 2.2.1 and, for v stages per rank, 2.2.2.
    """
    p, _, f, i, w = case
    return np.asarray((p - 1) * (f + i + w))


def interleaved_zero_bubble(case: Case) -> Floats:
    """Return the bubble of interleaved ZB-H1: (p-1)(f+i-w), as for ZB-H1, or (p-1) i if w > f."""
    p, _, f, i, w = case
    return (p - 1) * (i + np.maximum(f - w, 0))


def zb_h1(case: Case) -> Floats:
    """Return the bubble of ZB-H1: (p-1)(f+i-w), or (p-1) i if w > f.

    Source: Qi et al. 2023, section 2.3, where the durations are called T_F, T_B and T_W. With fewer micro-batches than
    ranks, fewer weight gradients can be deferred, so the bubble is larger.
    """
    p, m, f, i, w = case
    late = np.minimum(p - 1, m - 1)
    return np.asarray((p - 1) * (f + i) - late * np.minimum(f, w))


def zb_h2(case: Case) -> Floats:
    """Return the bubble of ZB-H2: (p-1)(f+i-2w) for equal durations (Qi et al. 2023, section 2.3).

    With fewer than 2p-1 micro-batches, fewer weight gradients can be deferred, so the bubble is larger.
    """
    p, m, f, i, w = case
    q, late = p - 1, np.minimum(2 * (p - 1), m - 1)
    half = late // 2
    return longest(
        q * (f + i) - late * w,
        (q - late) * f + q * i,
        (q - late + half) * f + (q - half) * i,
        (q - half) * (f + i) - (late - 2 * half) * w,
    )


def zbv(case: Case) -> Floats:
    """Return the bubble of ZBV: 0 for equal durations and at least 2p-1 micro-batches (Qi et al. 2023, section 6).

    The order of operations is torch's, which was designed for equal durations. The formula is exact for equal
    durations. It is also exact for unequal durations with at least 2p-1 micro-batches, unless w < i < f: then the
    returned bubble can be too small by a few per cent of a step.
    """
    p, m, f, i, w = case
    q = p - 1
    few = longest(
        2 * np.maximum(q - m + 1, 0) * f + 2 * q * i - 2 * np.maximum(m - p, 0) * w, (2 * q - m + 1) * (f + i)
    )
    many = longest(
        0.0 * f,
        2 * q * (i - w),
        q * (i - f),
        i - q * f + (q - 1) * w,
        (q - 1) * np.abs(w - f),
        q * (2 * f - i - w),
        (q - 1) * (f - i),
        (2 * q - 1) * f + i - 2 * q * w,
    )
    return np.where(p == 1, 0.0, np.where(m < 2 * p - 1, few, many))


def dualpipev(case: Case) -> Floats:
    """Return the bubble of DualPipeV: (p-1) f for equal durations.

    DeepSeek's table (DualPipe's README, 2025) states (p-1)(F&B + B - 3W), where F&B is a forward and a backward that
    run as one operation, with both results ready at its end. Here the two passes run in sequence, so the result of the
    first is sent earlier.
    """
    p, _, f, i, w = case
    q = p - 1
    sums = longest(
        q * f,
        2 * q * i - q * w - f,
        q * (f + i - w),
        q * i - f,
        2 * q * (f - w),
        q * (2 * f - i - w),
    )
    return np.where(p == 1, 0.0, sums)


def v_half(case: Case) -> Floats:
    """Return the bubble of V-Half: about (p-1)(f+i+w), half that of 1F1B, in which stages take twice as long.

    Source: Qi et al. 2024. For equal durations d, the bubble is (3p-3) d for even p and (3p-4) d for odd p. If input
    gradients or forwards take much longer than the other operations, the bubble grows with the number of micro-batches.
    """
    p, m, f, i, w = case
    odd, ramp = p % 2, p - 1
    wide = ramp + 2 * (1 - odd)
    least = longest(
        wide * f + 3 * ramp * i - (p + 1 - odd) * w,
        wide * f + (2 * p - 3 + odd) * i - w,
        (wide + 1) * f + (2 * p - 5 + odd) * i,
        (2 * m + p - 2) * f - (2 * m - 2 * p + 1 + odd) * i,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p + 1 + odd) * i - (p - 2) * w,
        (2 * m + 2 * p - 4) * f - (2 * m - 2 * p - 1 + odd) * i - p * w,
        (2 * m + 2 * p - 5 + odd) * f - (2 * m - 2 * p - 3 + 3 * odd) * i - (p + 1 - odd) * w,
        (2 * p + 3 * (1 - odd) - 2 * m) * f
        + (2 * m + 2 * p - 5 + odd) * i
        - np.where(p == 3, 2 * m - 1, m + (p + 2 - odd) / 2) * w,
    )
    few = 2 * ramp * (f + i) - (1 + 2 * np.maximum(m - 2 + odd, 0)) * w
    sums = np.where(p == 2, _v_half_of_two(m, f, i, w), least)
    return np.where(p == 1, 0.0, np.where(m < p // 2 + 1, few, sums))


def _v_half_of_two(m: Floats, f: Floats, i: Floats, w: Floats) -> Floats:
    """Return the bubble of V-Half on two ranks."""
    return longest(
        3 * (f + i - w),
        3 * f + i - w,
        f + 4 * i - 3 * w,
        2 * f,
        (7 - 2 * m) * f + (2 * m - 1) * (i - w),
        (5 - 2 * m) * f + 2 * m * i - (2 * m - 1) * w,
        2 * m * f - (2 * m - 3) * i - (m - 1) * w,
    )


def v_min(case: Case) -> Floats:
    """Return the bubble of V-Min: about 4/3 (p-1)(f+i+w), 2/3 that of 1F1B, in which stages take twice as long.

    Source: Qi et al. 2024. For equal durations d, the bubble is (4p-5) d, or (4p-3) d if 3 divides p. If forwards or
    input gradients take more than a third of the work, the bubble grows with the number of micro-batches, because the
    work of two micro-batches on a rank takes at least as long as six forwards or six input gradients.
    """
    p, m, f, i, w = case
    sums = np.where(p == 2, _v_min_of_two(m, f, i, w), np.where(p % 3 == 0, *_v_min_of_more(p, m, f, i, w)))
    return np.where(p == 1, 0.0, np.where(m == 1, 2 * (p - 1) * (f + i) - w, sums))


def _v_min_of_two(m: Floats, f: Floats, i: Floats, w: Floats) -> Floats:
    """Return the bubble of V-Min on two ranks."""
    return longest(
        3 * f,
        (3 - m) * f + 2 * m * i - m * w,
        2 * m * f + (3 - m) * i - m * w,
        (m + 1) * (f + i) - (2 * m - 1) * w,
    )


def _v_min_of_more(p: Floats, m: Floats, f: Floats, i: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Return two bubbles of V-Min, both for p > 2 ranks: the first if p is a multiple of 3, the second otherwise."""
    k, rest = p // 3, p % 3
    small, large, late = 2 * p - 2 * m, 2 * p - 6 + 4 * m, (2 * m - 1) * w
    # A rank's weight gradients fill its waits, at most all of them; else shorter ones would lengthen the step.
    few, many = np.minimum(k + 1, 2 * m) * w, np.minimum(2 * k, 2 * m) * w
    paused = longest(
        (8 * k - 1) * f + (5 * k - 1) * i - few,
        (5 * k + 2) * f + (8 * k - 4) * i - few,
        (small + 1) * f + large * i - late,
        (small + 4) * f + (large - 2) * i - late,
        (large - 2) * f + (small + 4) * i - late,
    )
    one = rest == 1
    straight = longest(
        np.where(one, 8 * k, 10 * k + 1) * f + np.where(one, 5 * k, 4 * k + 2) * i - np.where(one, few, many),
        np.where(one, 5 * k, 4 * k + 3) * f + np.where(one, 8 * k, 10 * k) * i - np.where(one, few, many),
        small * f + large * i - late,
        large * f + small * i - late,
    )
    return paused, straight


def interleaved_ramp(case: Case) -> Floats:
    """Return the ramp of plain and interleaved ZB-H1: (p-1) f, until the last rank starts, which then never waits."""
    p, _, f, _, _ = case
    return np.asarray((p - 1) * f)


def zb_h2_ramp(case: Case) -> Floats:
    """Return the ramp of ZB-H2: (p-1) f as in `interleaved_ramp`, and with few micro-batches also waiting time."""
    p, m, f, i, _ = case
    late = np.minimum(2 * (p - 1), m - 1)
    return np.asarray((p - 1) * f + (p - 1 - (late + 1) // 2) * i)


def zbv_ramp(case: Case) -> Floats:
    """Return the ramp of ZBV; since its stages form a V, ranks not only start but also finish one after another."""
    p, m, f, i, w = case
    q = p - 1
    sums = longest(
        q * i,
        np.maximum(f, i) + (q - 1) * w,
        2 * q * (i - w),
        (2 * q - 1) * f - (q - 1) * i,
        2 * q * f - q * i - w,
    )
    return np.where(p == 1, 0.0, np.where(m < 2 * p - 1, q * i, sums))
