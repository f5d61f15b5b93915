"""Reduction inside the network: by switches, and over switched optical wavelengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase
from shardscope.analytic.communication.ring import Floats


class Levels(NamedTuple):
    """The levels of a tree over W workers in groups of m."""

    depth: Floats
    top: Floats
    """Members of the last group; 1 if there is no level."""
    added: Floats
    """Number of tensors that the root, which leads its group on every level, adds to its own."""


def group_levels(workers: Floats, group: Floats) -> Levels:
    """Return the ⌈log_m W⌉ levels, computed in integer arithmetic, and the size of the last group."""
    left, size = np.broadcast_arrays(
        np.asarray(workers, dtype=np.float64), np.asarray(group, dtype=np.float64)
    )
    depth, top, added = np.zeros(left.shape), np.ones(left.shape), np.zeros(left.shape)
    while np.any(is_open := left > 1):
        depth = depth + is_open
        top = np.where(is_open, np.minimum(left, size), top)
        added = added + np.where(is_open, np.minimum(left, size) - 1, 0.0)
        left = np.where(is_open, np.ceil(left / size), left)
    return Levels(depth, top, added)


def optical_steps(workers: Floats, wavelengths: Floats) -> Floats:
    """Number of steps of WRHT: 2⌈log_m W⌉ with m = 2w+1, one fewer if the last representatives can exchange all to all.

    The m-1 other members of a group, w on each side, reach the middle one in one step if each has its own wavelength;
    adjacent groups reuse the same wavelengths. The m* remaining representatives exchange in one step if there are at
    least ⌈m*²/8⌉ wavelengths.
    """
    levels = group_levels(workers, 2 * wavelengths + 1)
    at_once = (np.ceil(levels.top**2 / 8) <= wavelengths) & (levels.depth > 0)
    steps: Floats = 2 * levels.depth - np.where(at_once, 1.0, 0.0)
    return steps


def _optical(message: CollectiveInput, *, wavelengths: Floats, reconfiguration: Floats) -> Cost:
    size = message.num_bytes
    steps = optical_steps(message.workers, wavelengths)
    added = group_levels(message.workers, 2 * wavelengths + 1).added * size
    phase = Phase("over light", steps, steps * size, added, pause=reconfiguration)
    return Cost((phase,), added, steps * size)


def _switches(message: CollectiveInput, *, radix: Floats) -> Cost:
    levels = group_levels(message.workers, radix).depth
    moved = np.where(message.workers > 1, message.num_bytes, 0.0)
    return Cost((Phase("up to the switches and down", 2 * levels, moved),), moved, moved)


def _shares(message: CollectiveInput) -> Cost:
    several = np.where(message.workers > 1, 1.0, 0.0)
    moved = several * message.num_bytes * (message.workers + 1) / message.workers
    return Cost((Phase("each worker its share", 2 * several, moved),), moved, moved)


OPTICAL_RING = Algorithm(
    title="optical ring",
    since=2022,
    source="Dai et al. 2022 (WRHT, arXiv 2207.10982); steps recounted by moving light through the ring",
    about="Workers sit on a ring of fibre with w wavelengths each way. Groups of 2w+1 reach their middle in one step, "
    "the middles form groups in turn, and the sum returns the same way. B is the bandwidth of one wavelength.",
    costs={"all_reduce": _optical},
    formulas={"all_reduce": "θ(α + δ + S/B) + c · S/γ,  θ = 2⌈log_m W⌉ or one less,  m = 2w+1"},
    options={
        "wavelengths": Option(64, "w, on each fibre", 1),
        "reconfiguration": Option(25e-6, "δ: seconds to reconfigure the switches", 0, is_whole=False),
    },
)
SHARP = Algorithm(
    title="in-network (SHARP)",
    since=2016,
    source="Graham et al. 2016 (SHARP, COMHPC)",
    about="Each switch adds up what it receives from below and passes the sum up; the total then flows back down.",
    costs={"all_reduce": _switches},
    formulas={"all_reduce": "2⌈log_r W⌉α + S/B"},
    options={"radix": Option(64, "r: links below each switch", 2)},
)
NVLS = Algorithm(
    title="in-network (NVLink SHARP)",
    since=2022,
    source="nccl-tests pull request 239 (S. Jeaugey, 2024: W+1 of W shares pass each link)",
    about="Each worker lets the switch sum one W-th of the tensor over all workers and write the result to all.",
    costs={"all_reduce": _shares},
    formulas={"all_reduce": "2α + (W+1)/W · S/B"},
)
