"""Bits allotted to layers, so that rounding leaves little error within a budget.

Like Markov et al. 2024 (L-GreCo), it looks for the least error over all layers; by greedy marginal gains, which find
it wherever layers are of equal size, as each bit of a layer takes away less than the one before, and come near it
elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardscope.methods.compressors.adaptive_bits import LEAST, MOST


@dataclass(frozen=True)
class Layer:
    """What is known of a layer when bits are allotted.

    Attributes:
        size: Its elements.
        spread: Sum over its elements of their block's largest magnitude, squared; rounding to b bits leaves a twelfth
            of it over ``(2**(b-1) - 1)**2``, squared and summed.
    """

    size: int
    spread: float

    def gain(self, bits: int) -> float:
        """What one more bit takes away from the error, an element of the layer."""
        return self.spread * (_fineness(bits) - _fineness(bits + 1)) / self.size


def _fineness(bits: int) -> float:
    """Square of a rounding step, in largest magnitudes."""
    return float(2 ** (bits - 1) - 1) ** -2


def allot(layers: Mapping[str, Layer], budget: float) -> dict[str, int]:
    """Bits of each layer: little error with no more than `budget` bits an element in the mean.

    The better of two searches: one starts from the fewest bits, the other from the same number for all layers.
    Layers without any gradient keep the fewest bits.
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


def left_out(layers: Mapping[str, Layer], bits: Mapping[str, int]) -> float:
    """Twelve times the squared error of all layers together."""
    return math.fsum(layer.spread * _fineness(bits[name]) for name, layer in layers.items())


def _climb(layers: Mapping[str, Layer], bits: dict[str, int], room: int) -> dict[str, int]:
    """One more bit at a time where it takes away most an element, as long as that is better than what it costs."""
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
        if taken:  # their next bits are others now
            waiting = [entry for entry in waiting if entry[1] not in taken]
            heapq.heapify(waiting)
        for changed in {name, *taken}:
            if bits[changed] < MOST:
                heapq.heappush(waiting, (-layers[changed].gain(bits[changed]), changed))
    return bits


def _take_back(
    layers: Mapping[str, Layer], bits: Mapping[str, int], name: str, missing: int
) -> list[str] | None:
    """Whose bits to take back, one a time it is named, to make room for one more of `name`; None if not worth it.

    A large layer may not fit by a little that small ones have taken.
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
