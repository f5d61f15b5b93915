"""Allocate bits to layers within a budget so that the rounding error is small.

As in Markov et al. 2024 (L-GreCo), the error over all layers is minimised, here by a greedy algorithm. Each additional
bit of a layer reduces the error less than the one before, so the algorithm finds the minimum if layers have equal
sizes, and comes close to it otherwise.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardscope.methods.compressors.adaptive_bits import LEAST, MOST


@dataclass(frozen=True)
class LayerStatistics:
    """Measurements of a layer for the allocation of bits.

    Attributes:
        size: Number of elements.
        spread: Sum over elements of the squared largest magnitude in their block. Rounding to b bits leaves a sum of
            squared errors of ``spread / 12 / (2**(b-1) - 1)**2``.
    """

    size: int
    spread: float

    def gain(self, bits: int) -> float:
        """Return the error reduction from one more bit, per element of the layer."""
        return self.spread * (_fineness(bits) - _fineness(bits + 1)) / self.size


def _fineness(bits: int) -> float:
    """Return the squared rounding step, relative to the squared largest magnitude."""
    return float(2 ** (bits - 1) - 1) ** -2


def allot(layers: Mapping[str, LayerStatistics], budget: float) -> dict[str, int]:
    """Return the bits per element for each layer: a small error with at most `budget` bits per element on average.

    The result is the better of two searches: one starts from the fewest bits, the other from equal bits for all layers.
    Layers whose gradients are all zero keep the fewest bits.
    """
    room = math.floor((budget - LEAST) * sum(layer.size for layer in layers.values()))
    active = {name: layer for name, layer in layers.items() if layer.spread > 0}
    equal = math.floor(budget)
    room_beside = room - (equal - LEAST) * sum(layer.size for layer in active.values())
    plans = [
        _climb(active, dict.fromkeys(active, LEAST), room),
        _climb(active, dict.fromkeys(active, equal), room_beside),
    ]
    best = min(plans, key=lambda bits: left_out(active, bits))
    return {name: best.get(name, LEAST) for name in layers}


def left_out(layers: Mapping[str, LayerStatistics], bits: Mapping[str, int]) -> float:
    """Return twelve times the total squared error of all layers."""
    return math.fsum(layer.spread * _fineness(bits[name]) for name, layer in layers.items())


def _climb(layers: Mapping[str, LayerStatistics], bits: dict[str, int], room: int) -> dict[str, int]:
    """Repeatedly add a bit to the layer with the largest error reduction per element, while the total error falls."""
    waiting = [(-layers[name].gain(b), name) for name, b in bits.items() if b < MOST]
    heapq.heapify(waiting)
    while waiting:
        _, name = heapq.heappop(waiting)
        taken = _take_back(layers, bits, name, layers[name].size - room)
        if taken is None:
            continue
        for other in taken:
            bits[other] -= 1
        bits[name] += 1
        room += sum(layers[other].size for other in taken) - layers[name].size
        if taken:  # their gains have changed
            waiting = [entry for entry in waiting if entry[1] not in taken]
            heapq.heapify(waiting)
        for changed in {name, *taken}:
            if bits[changed] < MOST:
                heapq.heappush(waiting, (-layers[changed].gain(bits[changed]), changed))
    return bits


def _take_back(
    layers: Mapping[str, LayerStatistics], bits: Mapping[str, int], name: str, missing: int
) -> list[str] | None:
    """Return layers that give up bits for one more bit of `name`, one per occurrence; None if the error would grow.

    Otherwise a large layer might not get a bit because small layers have already taken some.
    """
    if missing <= 0:
        return []
    worth = layers[name].gain(bits[name]) * layers[name].size
    last = [
        (layers[other].gain(bits[other] - 1), other, bits[other]) for other in bits if bits[other] > LEAST
    ]
    heapq.heapify(last)
    taken: list[str] = []
    while missing > 0:
        if not last:
            return None
        gain, other, had = heapq.heappop(last)
        if other == name:
            continue
        worth -= gain * layers[other].size
        if worth <= 0:
            return None
        missing -= layers[other].size
        taken.append(other)
        if had - 1 > LEAST:
            heapq.heappush(last, (layers[other].gain(had - 2), other, had - 1))
    return taken
