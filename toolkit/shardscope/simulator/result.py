"""Result of a simulation: step time as a tree of terms, bytes and use of each link, idle time, events."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.analytic.terms import Term
from shardscope.errors import SpecError, unknown_name
from shardscope.runlog.step_events import MESSAGE, StepEvent, StepEvents, in_order
from shardscope.show import Part, Sentences, Shown, Tree
from shardscope.simulator.breakdown import busy_seconds
from shardscope.simulator.graph import JOIN
from shardscope.simulator.replicas import Replicated
from shardscope.spec.look import Arrangement
from shardscope.spec.units import bytes_text, duration_text

if TYPE_CHECKING:
    import pandas as pd

MOST_RANKS = 64
"""Maximum number of ranks whose events are listed."""
MOST_EVENTS = 200_000
"""Maximum number of events that are listed."""
_CODEC = "codec"


@dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """A simulated training step.

    Attributes:
        label: What was simulated.
        num_devices: Number of devices, or ranks.
        time: Step time, in seconds, as a sum of terms with the names of the prediction's terms, for the rank that
            computes longest. A rank starts its next step when it has finished its own, so a step takes as long as the
            longest time from a rank's first operation to its last.
        merged: Sentences on the parts that were merged, and on other simplifications.
        lane_ranks: Ranks that each lane represents; they do the same at the same time.
        done: The operations and their times.
        arrangement: Arrangement of the ranks in drawings.
        roles: Role of each rank.
        lost_s: Seconds lost to failures, which `time` includes.
        work: The global batch and the sequence length; empty for the step of a trace.
    """

    label: str
    num_devices: int
    time: Term
    merged: tuple[str, ...]
    lane_ranks: tuple[tuple[int, ...], ...]
    done: Replicated
    arrangement: Arrangement
    roles: tuple[str | None, ...] = ()
    lost_s: float = 0.0
    work: str = ""

    @property
    def step_time_s(self) -> float:
        """Time of one step, in seconds."""
        return self.time.value

    @property
    def num_events(self) -> int:
        """Number of events that the simulation processed."""
        return self.done.times.num_events

    @cached_property
    def idle_fraction(self) -> float:
        """Fraction of the step, without failures, in which a lane does not compute, averaged over the lanes."""
        return 1.0 - float(busy_seconds(self.done).mean()) / self.done.times.total

    def lanes(self) -> pd.DataFrame:
        """Return a data frame with one row per lane: its name, its ranks, and its computing and idle time in seconds.

        Columns: lane, first_rank, num_ranks, computing_s, idle_s.
        """
        import pandas as pd

        busy = busy_seconds(self.done)
        names = [
            name if len(self.done.copies) == 1 else f"replica {copy}, {name}"
            for copy in self.done.copies
            for name in self.done.graph.lanes
        ]
        return pd.DataFrame({
            "lane": names, "first_rank": [ranks[0] for ranks in self.lane_ranks],
            "num_ranks": [len(ranks) for ranks in self.lane_ranks],
            "computing_s": busy, "idle_s": self.done.times.total - busy,
        })  # fmt: skip

    def links(self) -> pd.DataFrame:
        """Return a data frame with one row per link of a replica that carries bytes.

        Columns: link, bytes (per step and device that shares the lane), busy (fraction of the step in which the bytes
        would occupy the link at its full rate).
        """
        import pandas as pd

        graph, total = self.done.graph, self.done.times.total
        carried, occupied = np.zeros(len(graph.capacity)), np.zeros(len(graph.capacity))
        links = np.asarray(graph.links, np.int64).reshape(-1, graph.width)
        for side in range(graph.width):
            used = links[:, side] >= 0
            np.add.at(carried, links[used, side], np.asarray(graph.payload)[used])
            np.add.at(occupied, links[used, side], np.asarray(graph.size)[used])
        busy = occupied / np.asarray(graph.capacity, float) / total if len(graph.capacity) else occupied
        frame = pd.DataFrame({"link": graph.link_names, "bytes": carried, "busy": busy})
        return frame[frame["bytes"] > 0].reset_index(drop=True)

    def collectives(self) -> pd.DataFrame:
        """Return a data frame with one row per collective: what all devices send in a step.

        Columns: collective, bytes, messages (missing if its messages were not simulated one by one).
        """
        import pandas as pd

        graph, sizes, counts = self.done.graph, dict[str, float](), dict[str, float]()
        lanes = len(graph.lanes)
        shares = np.array([len(ranks) for ranks in self.lane_ranks]).reshape(-1, lanes).sum(axis=0)
        for op in range(graph.num_ops):
            kind = graph.kinds[op]
            if kind == JOIN or (graph.links[graph.width * op] < 0 and graph.peers[op] < 0):
                continue
            share = float(shares[graph.op_lane[op]])
            sizes[kind] = sizes.get(kind, 0.0) + graph.payload[op] * share
            counts[kind] = counts.get(kind, 0.0) + (share if graph.peers[op] >= 0 else np.nan)
        return pd.DataFrame(
            {"collective": list(sizes), "bytes": list(sizes.values()), "messages": list(counts.values())}
        )

    @cached_property
    def timeline(self) -> StepEvents:
        """The events of the step on each rank.

        Raises:
            SpecError: There are more than 64 ranks, or more than 200,000 events.
        """
        graph, times = self.done.graph, self.done.times
        places = [
            (copy * graph.num_ops + i, i, copy * len(graph.lanes))
            for copy in range(len(self.done.copies))
            for i in range(graph.num_ops)
            if graph.kinds[i] != JOIN and times.end[copy * graph.num_ops + i] > times.start[copy * graph.num_ops + i]
        ]  # fmt: skip
        if self.num_devices > MOST_RANKS:
            raise SpecError(
                f"{self.num_devices} devices are too many to draw one by one; use at most {MOST_RANKS}, or read "
                "`lanes()` and `links()`"
            )
        num_events = sum(len(self.lane_ranks[base + graph.op_lane[i]]) for _, i, base in places)
        if num_events > MOST_EVENTS:
            raise SpecError(
                f"the step has {num_events} events, which are too many to draw one by one; simulate fewer "
                "micro-batches, or read `lanes()` and `links()`"
            )
        events = [event for op, i, base in places for event in self._events(op, i, base)]
        return StepEvents(
            label=self.label, origin="simulated", arrangement=self.arrangement, world_size=self.num_devices, step=1,
            step_time_s=times.total, events=in_order(events), roles=self.roles, note=" ".join(self.merged),
        )  # fmt: skip

    def _events(self, op: int, place: int, base: int) -> list[StepEvent]:
        """Return the events of an operation, one for each rank of its lane."""
        graph, times = self.done.graph, self.done.times
        start, end = float(times.start[op]), float(times.end[op])
        ranks, size = self.lane_ranks[base + graph.op_lane[place]], round(graph.payload[place])
        kind, peer, item = graph.kinds[place], graph.peers[place], graph.labels[place]
        if peer >= 0:
            peers, shift = self.lane_ranks[base + peer], graph.shifts[place]
            peers = (*peers[shift:], *peers[:shift])
            return [
                StepEvent(a, MESSAGE, kind, start, end, b, size, item)
                for a, b in zip(ranks, peers, strict=False)
            ]
        lane = (
            "communication"
            if graph.links[graph.width * place] >= 0
            else _CODEC
            if kind == _CODEC
            else "compute"
        )
        return [StepEvent(rank, lane, kind, start, end, None, size, item) for rank in ranks]

    def export(self, path: str | Path, *, format: str = "chrome-trace") -> str:  # noqa: A002 - as in `Run.export`
        """Write the step for other tools, and return the path.

        Args:
            path: The file, or for ``chakra`` the start of the name of each rank's file.
            format: ``chrome-trace``, for ui.perfetto.dev and chrome://tracing, or ``chakra``, MLCommons Chakra
                execution traces.

        Raises:
            SpecError: There is no such format, its library is not installed, or the step is too large.
        """
        from shardscope.simulator.traces import FORMATS

        if format not in FORMATS:
            raise unknown_name("format", format, FORMATS)
        return FORMATS[format](self, path)

    def to_dict(self) -> dict[str, Any]:
        """Return all values in a JSON-compatible form, without the events."""
        return {
            "label": self.label, "num_devices": self.num_devices, "step_time_s": self.step_time_s,
            "idle_fraction": self.idle_fraction, "lost_s": self.lost_s, "num_events": self.num_events,
            "time": self.time.to_dict(), "links": self.links().to_dict("records"),
            "lanes": self.lanes().to_dict("records"), "merged": list(self.merged),
        }  # fmt: skip

    def _headline(self) -> list[str]:
        busiest = self.links()
        sent = "no link carries bytes"
        if len(busiest):
            row = busiest.sort_values("busy").iloc[-1]
            sent = (
                f"busiest link: {row['link']}, {bytes_text(int(row['bytes']))}, {row['busy']:.0%} of the step"
            )
        return [
            ", ".join(filter(None, [self.label, self.work, f"simulated on {self.num_devices:,} devices"])),
            f"step {duration_text(self.step_time_s)}, {self.idle_fraction:.1%} of it not computing; {sent}",
            *self.merged,
        ]

    def _shown(self) -> list[Part]:
        return [Sentences(self._headline()), Tree(self.time)]
