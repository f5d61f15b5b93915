"""Memory of each rank during a simulated step, from the predicted peaks of each type of memory.

Parameters, optimizer state and buffers are constant. Activations grow evenly during each forward pass up to their
peak, and shrink during the backward pass; a pipeline's follow its schedule. Gradients that stay in communication
buckets are constant, other gradients grow during the first backward pass. Gathered parameters change with every
all-gather, in proportion to its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.step_events import MemoryPoint
from shardscope.simulator.together import TimedPass

_PIECES = 8
"""Number of parts in which activations and gradients grow or shrink during a pass."""
Change = tuple[int, float, str, float]
"""A rank, a time in seconds, a type of memory, and its bytes from then on."""
Peaks = Mapping[str, Sequence[float]]


def memory_points(
    peaks: Peaks, ranks: int, changes: Iterable[Change], changing: Iterable[str]
) -> tuple[MemoryPoint, ...]:
    """Return the memory of each rank over time: at the start of the step, and after each change.

    Args:
        peaks: Peak bytes of each type of memory on each rank.
        ranks: Number of ranks.
        changes: All changes of memory.
        changing: Types of memory that are 0 at the start of the step; the others start at their peak.
    """
    empty = set(changing)
    by_rank: dict[int, list[Change]] = {rank: [] for rank in range(ranks)}
    for change in changes:
        by_rank[change[0]].append(change)
    points = []
    for rank, own in by_rank.items():
        held = {
            kind: 0.0 if kind in empty or kind not in peaks else float(peaks[kind][rank])
            for kind in MEMORY_KINDS
        }
        points.append(_point(rank, 0.0, held))
        for at, same in groupby(sorted(own, key=lambda change: change[1]), key=lambda change: change[1]):
            held |= {kind: size for _, _, kind, size in same}
            points.append(_point(rank, at, held))
    return tuple(sorted(points, key=lambda point: (point.at_s, point.rank)))


def _point(rank: int, at: float, held: Mapping[str, float]) -> MemoryPoint:
    return MemoryPoint(rank, at, tuple(round(held[kind]) for kind in MEMORY_KINDS))


def lockstep_changes(
    peaks: Peaks, passes: Sequence[TimedPass], ranks: int, *, grows: bool
) -> Iterator[Change]:
    """Yield the changes of activations, gathered parameters and, if `grows`, gradients in a step of `together`."""
    first = min((each.micro_batch for each in passes if each.phase == "backward"), default=0)
    for rank in range(ranks):
        for each in passes:
            if each.phase in ("forward", "backward"):
                yield from _ramp(rank, each, "activations", peaks, falls=each.phase == "backward")
                yield from _gathered(rank, each, passes, peaks)
            if grows and each.phase == "backward" and each.micro_batch == first:
                yield from _ramp(rank, each, "gradients", peaks, falls=False)
        yield rank, passes[-1].end, "gathered", 0.0
        if grows:
            yield rank, passes[-1].end, "gradients", 0.0


def _ramp(rank: int, each: TimedPass, kind: str, peaks: Peaks, *, falls: bool) -> Iterator[Change]:
    if kind not in peaks:
        return
    for k in range(1, _PIECES + 1):
        share = 1 - k / _PIECES if falls else k / _PIECES
        yield rank, each.at(k / _PIECES), kind, float(peaks[kind][rank]) * share


def _gathered(rank: int, each: TimedPass, passes: Sequence[TimedPass], peaks: Peaks) -> Iterator[Change]:
    largest = max((size for other in passes for _, size in other.gathers), default=0)
    if not largest or "gathered" not in peaks:
        return
    for at, size in each.gathers:
        yield rank, at, "gathered", float(peaks["gathered"][rank]) * size / largest
    if each.phase == "backward":
        yield rank, each.end, "gathered", 0.0
