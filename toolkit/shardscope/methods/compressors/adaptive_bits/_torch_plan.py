"""Allocate bits to layers within a budget so that the rounding error is small.

As in Markov et al. 2024 (L-GreCo), the error over all layers is minimised, here by a greedy algorithm. Each additional
bit of a layer reduces the error less than the bit before it, so the algorithm finds the minimum if all layers have the
same size, and comes close to the minimum otherwise.
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
        spread: Sum over all blocks of the squared largest magnitude times the number of elements in the block. The sum
            of squared errors after rounding to b bits is ``spread / 12 / (2**(b-1) - 1)**2``.
    """

    size: int
    spread: float

    def gain(self, bits: int) -> float:
        """Return how much one more bit per element would reduce the layer's error, divided by the layer's size."""
        return self.spread * (_squared_step(bits) - _squared_step(bits + 1)) / self.size


def _squared_step(bits: int) -> float:
    """Return the squared rounding step, relative to the squared largest magnitude."""
    return float(2 ** (bits - 1) - 1) ** -2


def allocate(layers: Mapping[str, LayerStatistics], budget: float) -> dict[str, int]:
    """Allocate at most `budget` bits per element on average so that the error is small; return the bits of each layer.

    The result is the better of two searches: one starts from the minimum number of bits for all layers, the other from
    equal bits for all layers. Layers whose gradients are all zero get the minimum.
    """
    spare = math.floor((budget - LEAST) * sum(layer.size for layer in layers.values()))
    active = {name: layer for name, layer in layers.items() if layer.spread > 0}
    equal = math.floor(budget)
    spare_beside = spare - (equal - LEAST) * sum(layer.size for layer in active.values())
    plans = [
        _climb(active, dict.fromkeys(active, LEAST), spare),
        _climb(active, dict.fromkeys(active, equal), spare_beside),
    ]
    best = min(plans, key=lambda bits: rounding_error(active, bits))
    return {name: best.get(name, LEAST) for name in layers}


def rounding_error(layers: Mapping[str, LayerStatistics], bits: Mapping[str, int]) -> float:
    """Return 12 times the sum of squared rounding errors over all layers."""
    return math.fsum(layer.spread * _squared_step(bits[name]) for name, layer in layers.items())


def _climb(layers: Mapping[str, LayerStatistics], bits: dict[str, int], spare: int) -> dict[str, int]:
    """Repeatedly add one bit per element to the layer with the largest gain, while this reduces the total error."""
    waiting = [(-layers[name].gain(b), name) for name, b in bits.items() if b < MOST]
    heapq.heapify(waiting)
    while waiting:
        _, name = heapq.heappop(waiting)
        taken = _take_back(layers, bits, name, layers[name].size - spare)
        if taken is None:
            continue
        for other in taken:
            bits[other] -= 1
        bits[name] += 1
        spare += sum(layers[other].size for other in taken) - layers[name].size
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
    """Return the layers that each give up one bit so that layer `name` gets one more; None if the error would grow.

    A layer that gives up several bits is listed several times. Without this step, small layers could use up the budget
    before a large layer gets the bits that it needs. `missing` is the number of bits that the budget lacks.
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
