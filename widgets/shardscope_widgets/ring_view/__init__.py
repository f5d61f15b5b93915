"""The ring all-reduce as an animation, from measured events.

`RingView` is a separate anywidget. Its traits hold one bucket of one step as plain values (`figures.ring_info`),
and a few hundred lines of JavaScript animate the chunks. Nothing is simulated: a packet leaves when its rank started
to send it and arrives when the send ended. All rounds are played at the same duration so that they are easy to follow.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import anywidget
import traitlets

from shardscope_widgets.figures._ring import RingInfo, newest_ring_step, ring_info
from shardscope_widgets.ring_view._captions import captions
from shardscope_widgets.trace import Source, Trace

EMPTY = (
    "No chunks recorded yet. Start a ring run with “chunk by chunk” ticked, "
    "or from code with strategy=Ring(trace_chunks=True)."
)


class RingView(anywidget.AnyWidget):
    """An animation of the chunks of a ring all-reduce.

    Args:
        run: A run launched with ``strategy=Ring(trace_chunks=True)``; None shows a hint instead.
        step: The step to show; by default the earliest recorded step.
        bucket: The gradient bucket to show, 0-based.

    Example:
        >>> RingView(run, step=3)  # doctest: +SKIP
    """

    _esm = files(__package__).joinpath("ring.js").read_text(encoding="utf-8")
    _css = files(__package__).joinpath("ring.css").read_text(encoding="utf-8")

    ring = traitlets.Dict().tag(sync=True)
    steps = traitlets.List(traitlets.Int()).tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    bucket = traitlets.Int(0).tag(sync=True)
    position = traitlets.Float(0.0, help="Rounds played: 2.4 is 40 % through the third.").tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    speed = traitlets.Float(1.0, help="Playback speed; at 1, a round takes 2.2 seconds.").tag(sync=True)
    empty = traitlets.Unicode(EMPTY).tag(sync=True)

    def __init__(
        self, run: Source | None = None, *, step: int | None = None, bucket: int = 0, **traits: Any
    ) -> None:
        super().__init__(**traits)
        self._trace: Trace | None = None
        if run is not None:
            self.show(Trace.read(run), step=step, bucket=bucket)

    def show(self, trace: Trace, *, step: int | None = None, bucket: int = 0) -> None:
        """Show a step of `trace`, or update the list of steps if `trace` is already shown."""
        newest = newest_ring_step(trace)
        steps = sorted(number for number in trace.chunks if newest is not None and number <= newest)
        if trace is not self._trace or not self.ring.get("rounds"):
            self._trace = trace
            chosen = step if step in steps else (steps[0] if steps else 0)
            with self.hold_trait_notifications():
                self.steps, self.step, self.bucket, self.position = steps, chosen, bucket, 0.0
            self._load()
        elif len(steps) != len(self.steps) and not self.playing:
            self.steps = steps

    @traitlets.observe("step", "bucket")
    def _load(self, _change: object = None) -> None:
        if self._trace is not None:
            self.ring = ring_dict(ring_info(self._trace, step=self.step or None, bucket=self.bucket))


def ring_dict(info: RingInfo) -> dict[str, Any]:
    """Return `info` with its captions as JSON-compatible values."""
    rounds = [[transfer._asdict() for transfer in transfers] for transfers in info.rounds]
    return info._asdict() | {"rounds": rounds, "captions": captions(info)}
