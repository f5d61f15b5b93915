"""Cost of a collective before it is converted to time: steps, bytes and additions on the critical path.

A `CollectiveInput` describes the data to move and the link. An algorithm turns it into a `Cost` of `Phase`s.
`LinkRates.price` is the alpha-beta-gamma model: each step takes a latency α, bytes are sent at bandwidth B and added
at rate γ (Hockney 1994; Thakur, Rabenseifner and Gropp 2005, section 3). All arrays follow NumPy broadcasting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import Floats


class CollectiveInput(NamedTuple):
    """Input of an algorithm: the tensor, the workers and the link."""

    num_bytes: Floats
    """S, bytes of the whole tensor; which part of it each rank has before and after depends on the operation."""
    workers: Floats
    """W, the number of workers; an integer of at least 1."""
    bandwidth: Floats
    """B, bytes per second that one worker sends while it receives at the same rate."""
    latency: Floats
    """α, seconds of latency per message."""


@dataclass(frozen=True)
class Phase:
    """Consecutive steps over links of one kind.

    Attributes:
        name: Description of the phase.
        steps: Number of consecutive messages.
        num_bytes: Bytes on the critical path: those that the busiest link carries in one direction, over all steps.
        reduced: Bytes that a worker adds to its own data during the phase.
        inside: Whether the links are inside a node rather than between nodes.
        pause: Seconds of each step in addition to its latency, such as reconfiguring an optical switch.
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
    """Bytes that the busiest link carries in one direction: a server's, a parent's, or any worker's if all are
    equal."""


class Price(NamedTuple):
    """Time of one phase by kind, in seconds."""

    latency: Floats
    bandwidth: Floats
    reduction: Floats

    @property
    def total(self) -> Floats:
        """Sum of all three, in seconds."""
        seconds: Floats = self.latency + self.bandwidth + self.reduction
        return seconds


class LinkRates(NamedTuple):
    """Rates of links and additions: α in seconds, B and γ in bytes per second."""

    bandwidth: Floats
    latency: Floats
    reduce_bandwidth: Floats
    inner_bandwidth: Floats
    inner_latency: Floats

    def price(self, phase: Phase) -> Price:
        """Return the time of a phase, in seconds."""
        bandwidth = self.inner_bandwidth if phase.inside else self.bandwidth
        latency = self.inner_latency if phase.inside else self.latency
        reduction: Floats = phase.reduced / self.reduce_bandwidth
        return Price(phase.steps * (latency + phase.pause), phase.num_bytes / bandwidth, reduction)


def log2_ceil(workers: Floats) -> Floats:
    """⌈log2 W⌉, exact for integers."""
    exponent: Floats = np.frexp(np.maximum(workers - 1, 0.0))[1].astype(np.float64)
    return exponent


def log2_floor(workers: Floats) -> Floats:
    """⌊log2 W⌋, exact for integers."""
    exponent: Floats = np.frexp(workers)[1].astype(np.float64) - 1
    return exponent
