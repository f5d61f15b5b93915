"""What a collective costs before it is priced: steps, bytes and additions on its critical path.

`Message` says what is to be moved and over what; an algorithm turns it into a `Cost` of `Phase`s; `Cost.seconds` is the
alpha-beta-gamma model: each step waits a latency α, bytes pass at the bandwidth B and are added at the rate γ
(Hockney 1994; Thakur, Rabenseifner and Gropp 2005, section 3). All numbers are arrays that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.ring import Floats


class Message(NamedTuple):
    """What is asked of an algorithm."""

    num_bytes: Floats
    """S: the whole tensor; what each rank has of it before or after depends on the operation."""
    workers: Floats
    """W, whole numbers from 1."""
    bandwidth: Floats
    """B: bytes a second that one worker sends while it receives as many."""
    latency: Floats
    """α: seconds a message takes besides."""


@dataclass(frozen=True)
class Phase:
    """Steps one after the other over links of one kind.

    Attributes:
        name: In words.
        steps: Messages that wait for one another.
        num_bytes: Bytes that pass the busiest link one way while the others wait, over all steps.
        reduced: Bytes that a worker adds to its own on the way.
        inside: Over the links inside a node instead of those between nodes.
        pause: Seconds that each step takes besides its latency: a switch that turns.
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
    """By the worker that sends most, over all its links."""
    carried: Floats
    """One way, over the link that carries most: a server's, a parent's, or every worker's alike."""


class Price(NamedTuple):
    """Seconds of one phase, by what they are spent on."""

    latency: Floats
    bandwidth: Floats
    reduction: Floats

    @property
    def total(self) -> Floats:
        """All three."""
        seconds: Floats = self.latency + self.bandwidth + self.reduction
        return seconds


class Rates(NamedTuple):
    """What the links and the adding cost: α in seconds, B and γ in bytes a second."""

    bandwidth: Floats
    latency: Floats
    reduce_bandwidth: Floats
    inner_bandwidth: Floats
    inner_latency: Floats

    def price(self, phase: Phase) -> Price:
        """The seconds of a phase."""
        bandwidth = self.inner_bandwidth if phase.inside else self.bandwidth
        latency = self.inner_latency if phase.inside else self.latency
        reduction: Floats = phase.reduced / self.reduce_bandwidth
        return Price(phase.steps * (latency + phase.pause), phase.num_bytes / bandwidth, reduction)


def log2_ceil(workers: Floats) -> Floats:
    """⌈log2 W⌉, exact for whole numbers."""
    exponent: Floats = np.frexp(np.maximum(workers - 1, 0.0))[1].astype(np.float64)
    return exponent


def log2_floor(workers: Floats) -> Floats:
    """⌊log2 W⌋, exact for whole numbers."""
    exponent: Floats = np.frexp(workers)[1].astype(np.float64) - 1
    return exponent
