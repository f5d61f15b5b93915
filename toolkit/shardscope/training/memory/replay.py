"""The memory in use at each mark in an `AllocationLedger`, and the moments of highest memory use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.spec.model.step import Moment, Phase
from shardscope.training.memory.ledger import AllocationLedger, Freed, Made, Placed


class StepMark(NamedTuple):
    """A point in the training step; `Moment` has the same fields."""

    phase: Phase
    unit: int
    done: int


class HandedOn(NamedTuple):
    """Event before a mark: the bytes in memory of the running unit's output and its gradient."""

    num_bytes: int


def replay(ledger: AllocationLedger, num_units: int, samples: int) -> Iterator[Moment]:
    """Yield the memory in use at each mark, computed from the events before it in the ledger."""
    gradients = ledger.gradients()
    sizes: dict[int, int] = {}
    owners: dict[int, int] = {}
    activations = arriving = handed_on = 0
    placed = [0] * (num_units + 1)
    for event in ledger.events:
        match event:
            case Made(storage, size):
                sizes[storage] = size
                arriving += size * (storage in gradients)
                activations += size * (storage not in gradients)
            case Placed(storage, owner) if storage in sizes and storage not in owners:
                owners[storage] = owner
                arriving -= sizes[storage]
                placed[owner] += sizes[storage]
            case Freed(storage) if storage not in owners:
                size = sizes.pop(storage)
                arriving -= size * (storage in gradients)
                activations -= size * (storage not in gradients)
            case HandedOn(num_bytes):
                handed_on = num_bytes
            case StepMark(phase, unit, done):
                here = sum(placed[1 : num_units + 1 - done]) if phase in ("turn", "backward", "leave") else 0
                yield Moment(
                    phase=phase, unit=unit, done=done, activations=activations / samples, arriving=arriving,
                    own=here, around=placed[0], outputs=handed_on / samples,
                )  # fmt: skip


def highest(moments: Iterator[Moment]) -> Iterator[Moment]:
    """Yield the Pareto-maximal moments among those with the same mark.

    A moment is left out if another moment with the same mark has at least as much memory in all amounts: activations,
    with and without the unit's output, and three types of gradient memory.
    """
    places: dict[StepMark, dict[tuple[float, ...], Moment]] = defaultdict(dict)
    for moment in moments:
        inner = moment.activations - moment.outputs
        amounts: tuple[float, ...] = (moment.activations, inner, moment.arriving, moment.own, moment.around)
        places[mark_of(moment)][amounts] = moment
    for found in places.values():
        for least, moment in found.items():
            if not any(other != least and _covers(other, least) for other in found):
                yield moment


def mark_of(moment: Moment) -> StepMark:
    return StepMark(moment.phase, moment.unit, moment.done)


def _covers(most: tuple[float, ...], least: tuple[float, ...]) -> bool:
    return all(a >= b for a, b in zip(most, least, strict=True))
