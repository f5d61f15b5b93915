"""All-reduce supported by the network: reduction in switches, and rings of switched optical wavelengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.algorithms._algorithm import Algorithm, Option
from shardscope.analytic.communication.cost import CollectiveInput, Cost, Phase
from shardscope.analytic.communication.ring import Floats


class Levels(NamedTuple):
    """A tree over W workers in which every node has at most m children."""

    depth: Floats
    """Number of levels."""
    top: Floats
    """Number of children of the root; 1 if there is no level."""
    added: Floats
    """Number of tensors that the root, which leads a group on every level, adds to its own tensor over all levels."""


def group_levels(workers: Floats, group: Floats) -> Levels:
    """Return the tree over `workers` workers in groups of at most `group`; its depth ⌈log_m W⌉ is exact."""
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
    """Return the number of steps of the optical ring (WRHT): 2⌈log_m W⌉ with groups of m = 2w+1 workers, or one fewer.

    In one step, the other m-1 members of a group, w on each side, send to its middle member, each on its own
    wavelength; adjacent groups reuse the same wavelengths. There is one step fewer if the last group, of m* members,
    can run an all-to-all exchange in a single step, which needs at least ⌈m*²/8⌉ wavelengths.

    Args:
        workers: W, the number of workers.
        wavelengths: w, the number of wavelengths in each direction.
    """
    levels = group_levels(workers, 2 * wavelengths + 1)
    at_once = (np.ceil(levels.top**2 / 8) <= wavelengths) & (levels.depth > 0)
    steps: Floats = 2 * levels.depth - np.where(at_once, 1.0, 0.0)
    return steps


def _optical(message: CollectiveInput, *, wavelengths: Floats, reconfiguration: Floats) -> Cost:
    """Return the cost of an all-reduce over the optical ring."""
    size = message.num_bytes
    steps = optical_steps(message.workers, wavelengths)
    added = group_levels(message.workers, 2 * wavelengths + 1).added * size
    phase = Phase("over optical links", steps, steps * size, added, pause=reconfiguration)
    return Cost((phase,), added, steps * size)


def _switches(message: CollectiveInput, *, radix: Floats) -> Cost:
    """Return the cost of an all-reduce in a tree of switches with `radix` links each."""
    levels = group_levels(message.workers, radix).depth
    moved = np.where(message.workers > 1, message.num_bytes, 0.0)
    return Cost((Phase("up to the switches and down", 2 * levels, moved),), moved, moved)


def _shares(message: CollectiveInput) -> Cost:
    """Return the cost of an all-reduce in an NVLink switch."""
    several = np.where(message.workers > 1, 1.0, 0.0)
    moved = several * message.num_bytes * (message.workers + 1) / message.workers
    return Cost((Phase("reduce and multicast in the switch", 2 * several, moved),), moved, moved)


OPTICAL_RING = Algorithm(
    title="optical ring",
    since=2022,
    source="Dai et al. 2022 (WRHT, arXiv 2207.10982); number of steps checked by simulating the ring",
    about="Workers are on a ring of fibre with w wavelengths each way. In a group of 2w+1, all send to the middle one "
    "in one step; the middle ones then form groups, and the sum returns the same way. B is the bandwidth of one "
    "wavelength.",
    costs={"all_reduce": _optical},
    formulas={"all_reduce": "θ(α + δ + S/B) + c · S/γ,  θ = 2⌈log_m W⌉ or one fewer,  m = 2w+1"},
    options={
        "wavelengths": Option(64, "w: wavelengths in each direction", 1),
        "reconfiguration": Option(25e-6, "δ: seconds to reconfigure the switches", 0, is_whole=False),
    },
)
SHARP = Algorithm(
    title="in-network (SHARP)",
    since=2016,
    source="Graham et al. 2016 (SHARP, COMHPC)",
    about="Each switch adds the tensors it receives from below and sends the sum up; the total is sent back down.",
    costs={"all_reduce": _switches},
    formulas={"all_reduce": "2⌈log_r W⌉α + S/B"},
    options={"radix": Option(64, "r: links below each switch", 2)},
)
NVLS = Algorithm(
    title="in-network (NVLink SHARP)",
    since=2022,
    source="nccl-tests pull request 239 (S. Jeaugey, 2024: each link carries (W+1)/W of the tensor)",
    about="Each worker lets the switch sum 1/W of the tensor over all workers and send the result to all of them.",
    costs={"all_reduce": _shares},
    formulas={"all_reduce": "2α + (W+1)/W · S/B"},
)
