"""The ring all-reduce of one gradient bucket, chunk by chunk, from measured events.

W ranks form a ring and each splits its gradients into W chunks. In each of the first W - 1 rounds (scatter-reduce),
every rank sends one chunk to its neighbour, which adds it to its own copy. Each rank then holds one chunk that is the
sum over all ranks. In the next W - 1 rounds (all-gather), these summed chunks travel once around the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.runlog.traffic import Event
from shardscope_widgets.figures import theme
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import bytes_text, seconds_text

PHASES = ("reduce_scatter", "all_gather")
PHASE_NAMES = {"reduce_scatter": "scatter-reduce", "all_gather": "all-gather"}
PHASE_COLOURS = {"reduce_scatter": "#e06c2c", "all_gather": "#2a86d1"}


class Transfer(NamedTuple):
    """One chunk sent from a rank to its neighbour; times are in milliseconds from the start of the first transfer."""

    phase: str
    round: int
    direction: int
    chunk: int
    source: int
    target: int
    num_bytes: int
    start_ms: float
    end_ms: float


class RingInfo(NamedTuple):
    """The ring all-reduce of one bucket.

    `rounds` are in chronological order. ``counts[k][d][rank][chunk]`` is the number of ranks whose gradients are summed
    in that rank's copy of the chunk after k rounds, in the ring with direction ``directions[d]``.
    """

    world_size: int
    step: int
    bucket: int
    num_buckets: int
    directions: tuple[int, ...]
    rounds: tuple[tuple[Transfer, ...], ...]
    counts: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


def ring_info(trace: Trace, *, step: int | None = None, bucket: int | None = None) -> RingInfo:
    """Return the ring all-reduce of one step and gradient bucket.

    Args:
        trace: The run.
        step: By default, the newest finished step whose chunks all ranks have reported.
        bucket: Index of the bucket; by default the first.
    """
    step = step if step in trace.chunks else newest_ring_step(trace)
    events = trace.chunks.get(step, []) if step is not None else []
    buckets = sorted({int(event["bucket"]) for event in events})
    bucket = bucket if bucket in buckets else (buckets[0] if buckets else 0)
    transfers = _transfers([event for event in events if int(event["bucket"]) == bucket])
    rounds = _rounds(transfers)
    directions = tuple(sorted({t.direction for t in transfers}, reverse=True)) or (1,)
    return RingInfo(
        trace.world_size,
        step or 0,
        bucket,
        len(buckets),
        directions,
        rounds,
        _counts(trace.world_size, directions, rounds),
    )


def newest_ring_step(trace: Trace) -> int | None:
    """Return the newest finished step whose chunks every rank has reported; None if there is none."""
    whole = [s for s, events in trace.chunks.items() if len({e["rank"] for e in events}) == trace.world_size]
    finished = {step.number for step in trace.steps if step.number in trace.chunks}
    return max((s for s in whole if s in finished), default=None)


def _transfers(events: Sequence[Event]) -> list[Transfer]:
    """Return one transfer per chunk; the slices in which a chunk is sent are merged."""
    zero = min((float(event["start"]) for event in events), default=0.0)
    whole: dict[tuple[Any, ...], Transfer] = {}
    for event in events:
        new = _transfer(event, zero)
        old = whole.get(new[:6], new._replace(num_bytes=0))
        whole[new[:6]] = new._replace(
            num_bytes=old.num_bytes + new.num_bytes,
            start_ms=min(old.start_ms, new.start_ms),
            end_ms=max(old.end_ms, new.end_ms),
        )
    return list(whole.values())


def _transfer(event: Event, zero: float) -> Transfer:
    return Transfer(
        phase=str(event["phase"]),
        round=int(event["round"]),
        direction=int(event.get("direction", 1)),
        chunk=int(event["chunk"]),
        source=int(event["rank"]),
        target=int(event["peer"]),
        num_bytes=int(event["bytes"]),
        start_ms=round((float(event["start"]) - zero) * 1e3, 4),
        end_ms=round((float(event["end"]) - zero) * 1e3, 4),
    )


def _rounds(transfers: Sequence[Transfer]) -> tuple[tuple[Transfer, ...], ...]:
    keys = sorted({(PHASES.index(t.phase), t.round) for t in transfers})
    return tuple(
        tuple(sorted(t for t in transfers if (PHASES.index(t.phase), t.round) == key)) for key in keys
    )


def _counts(
    world_size: int, directions: tuple[int, ...], rounds: Sequence[Sequence[Transfer]]
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    now = {
        (d, rank, chunk): 1 for d in directions for rank in range(world_size) for chunk in range(world_size)
    }
    history = [_table(now, directions, world_size)]
    for transfers in rounds:
        before = dict(now)
        for t in transfers:
            sent, own = before[t.direction, t.source, t.chunk], before[t.direction, t.target, t.chunk]
            now[t.direction, t.target, t.chunk] = sent + own if t.phase == PHASES[0] else sent
        history.append(_table(now, directions, world_size))
    return tuple(history)


def _table(
    now: dict[tuple[int, int, int], int], directions: tuple[int, ...], world_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    ranks = range(world_size)
    return tuple(tuple(tuple(now[d, rank, chunk] for chunk in ranks) for rank in ranks) for d in directions)


def ring_text(info: RingInfo) -> str:
    """Describe the whole all-reduce in words."""
    if not info.rounds:
        return "No chunks were recorded; launch with strategy=Ring(trace_chunks=True)."
    last = [t for r in info.rounds for t in r]
    total, time = sum(t.num_bytes for t in last), max(t.end_ms for t in last) / 1e3
    return (
        f"Step {info.step}, bucket {info.bucket + 1} of {info.num_buckets}: {len(last)} chunks travelled in "
        f"{len(info.rounds)} rounds, {bytes_text(total)} in {seconds_text(time)}."
    )


def draw(info: RingInfo) -> go.Figure:
    """Draw each chunk as a line from its sender's row at its start time to its receiver's row at its end time."""
    figure = go.Figure()
    for phase in PHASES:
        transfers = [t for r in info.rounds for t in r if t.phase == phase]
        nothing = [None] * len(transfers)
        figure.add_trace(
            go.Scatter(
                x=[x for t in transfers for x in (t.start_ms, t.end_ms, None)],
                y=[y for t in transfers for y in (t.source, t.target, None)],
                text=[
                    text
                    for t, n in zip(transfers, nothing, strict=True)
                    for text in (_hover(t), _hover(t), n)
                ],
                name=PHASE_NAMES[phase],
                mode="lines+markers",
                line={
                    "color": PHASE_COLOURS[phase],
                    "width": 1.8,
                    "dash": "solid" if phase == PHASES[0] else "dash",
                },
                marker={"size": 6, "symbol": "circle" if phase == PHASES[0] else "diamond"},
                hovertemplate="%{text}<extra></extra>",
            )
        )
    ranks = list(range(info.world_size))
    figure.update_layout(
        xaxis=theme.axis("milliseconds", rangemode="tozero"),
        yaxis=theme.axis(
            tickvals=ranks, ticktext=[f"rank {rank} " for rank in ranks], range=[info.world_size - 0.6, -0.4]
        ),
    )
    return theme.style(figure, height=110 + 50 * info.world_size)


def _hover(transfer: Transfer) -> str:
    return (
        f"<b>chunk {transfer.chunk}</b>, {bytes_text(transfer.num_bytes)}<br>rank {transfer.source} to rank "
        f"{transfer.target}<br>{PHASE_NAMES[transfer.phase]}, round {transfer.round + 1}"
    )


def ring(trace: Trace, *, step: int | None = None, bucket: int | None = None) -> go.Figure:
    """Draw the chunks of one ring all-reduce over time; arguments as for `ring_info`."""
    return draw(ring_info(trace, step=step, bucket=bucket))
