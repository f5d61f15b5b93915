"""Cost of a collective as steps, bytes and additions on the critical path, and the conversion of this cost to time.

A `CollectiveInput` describes the data to move and the link. For this input, an algorithm returns a `Cost`, which
consists of `Phase`s. `LinkRates.price` converts a phase to time by the alpha-beta-gamma model: each step takes a
latency α, bytes are sent at bandwidth B, and bytes are added at rate γ (Hockney 1994; Thakur, Rabenseifner and Gropp
2005, section 3). All arrays can be broadcast against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import Floats


class CollectiveInput(NamedTuple):
    """Input of a collective algorithm: the size of the tensor, the number of workers, and the link."""

    num_bytes: Floats
    """S, bytes of the whole tensor, as defined for `collective_time`."""
    workers: Floats
    """W, the number of workers; an integer of at least 1."""
    bandwidth: Floats
    """B, bytes per second that one worker sends while it receives at the same rate."""
    latency: Floats
    """α, seconds of latency per message."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a collective that all use links inside nodes, or all use links between nodes.

    Attributes:
        name: Description of the phase, for legends.
        steps: Number of consecutive messages.
        num_bytes: Bytes on the critical path: those that the busiest link carries in one direction, over all steps.
        reduced: Bytes that a worker adds to its own data during the phase.
        inside: Whether the links are inside nodes.
        pause: Seconds that each step takes in addition to its latency, for example to reconfigure an optical switch.
    """

    name: str
    steps: Floats
    num_bytes: Floats
    reduced: Floats | float = 0.0
    inside: bool = False
    pause: Floats | float = 0.0


class Cost(NamedTuple):
    """The phases of a collective and its volumes, in bytes."""

    phases: tuple[Phase, ...]
    sent: Floats
    """Bytes sent by the worker that sends the most, over all its links."""
    carried: Floats
    """Bytes that the busiest link carries in one direction, such as the link of a server or of a tree's inner node."""


class Price(NamedTuple):
    """Time of one phase in seconds, split into latency, bandwidth and reduction (additions)."""

    latency: Floats
    bandwidth: Floats
    reduction: Floats

    @property
    def total(self) -> Floats:
        """Total time of the phase, in seconds."""
        seconds: Floats = self.latency + self.bandwidth + self.reduction
        return seconds


class LinkRates(NamedTuple):
    """Rates of links and additions.

    Attributes:
        bandwidth: B between nodes, in bytes per second.
        latency: α between nodes, in seconds.
        reduce_bandwidth: γ, the rate of additions, in bytes per second.
        inner_bandwidth: B inside nodes, in bytes per second.
        inner_latency: α inside nodes, in seconds.
    """

    bandwidth: Floats
    latency: Floats
    reduce_bandwidth: Floats
    inner_bandwidth: Floats
    inner_latency: Floats

    def price(self, phase: Phase) -> Price:
        """Return the time of a phase in the alpha-beta-gamma model, in seconds."""
        bandwidth = self.inner_bandwidth if phase.inside else self.bandwidth
        latency = self.inner_latency if phase.inside else self.latency
        reduction: Floats = phase.reduced / self.reduce_bandwidth
        return Price(phase.steps * (latency + phase.pause), phase.num_bytes / bandwidth, reduction)


def log2_ceil(workers: Floats) -> Floats:
    """Return ⌈log2 W⌉, exact for integers."""
    exponent: Floats = np.frexp(np.maximum(workers - 1, 0.0))[1].astype(np.float64)
    return exponent


def log2_floor(workers: Floats) -> Floats:
    """Return ⌊log2 W⌋, exact for integers."""
    exponent: Floats = np.frexp(workers)[1].astype(np.float64) - 1
    return exponent
